from typing import Any

class Launcher:
    """Launches kernels of one signature; native/launcher.cc says how.

    ``signature``: Triton's names of types, and tuples of them. Raises ValueError for a type that it does not know, as
    those of tensor descriptors.
    """

    def __init__(self, signature: tuple[Any, ...], /) -> None: ...
    def __call__(
        self,
        grid_x: int,
        grid_y: int,
        grid_z: int,
        stream: int,
        function: int,
        cooperative: bool,
        programmatic: bool,
        global_scratch: Any,
        profile_scratch: Any,
        kernel_metadata: tuple[int, int, int],
        launch_metadata: Any,
        enter_hook: Any,
        exit_hook: Any,
        /,
        *arguments: Any,
    ) -> None:
        """As Triton 3.6's launchers: enqueues nothing where the grid is empty, and calls the hooks with the metadata.
        Raises what converting an argument raises, ValueError for memory that the device cannot read, and RuntimeError
        for what the driver refuses."""
