"""torch.distributed on the device flagos: its tensors travel as those of the inner device, over that device's backend.

registration.py makes the backend known; once the device is in use kernels.py stands below every collective.
"""
