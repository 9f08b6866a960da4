"""Public: the entry point of torch_dynamo_backends."""

from flagos_backend.frontends.torch.compile.backend import flagos

__all__ = ["flagos"]
