"""A thin typed client of a loaded backend: the plugin ABI as Python objects, for tests, tools and framework hosts.

Last stage of the host side: loader.load() accepts a Backend, this calls through its table and adds nothing.
"""

from plugin_abi.host.api import Api, ElementType, HostArray, HostCallback, KeyValueStore
from plugin_abi.host.buffer import Buffer, Event, HostBufferSemantics
from plugin_abi.host.context import Context, Device, Memory, MemoryStats
from plugin_abi.host.executable import Artifact, Executable, ExecutableDescription, TensorSpec, made_meanwhile

__all__ = [
    "Api",
    "Artifact",
    "Buffer",
    "Context",
    "Device",
    "ElementType",
    "Event",
    "Executable",
    "ExecutableDescription",
    "HostArray",
    "HostBufferSemantics",
    "HostCallback",
    "KeyValueStore",
    "Memory",
    "MemoryStats",
    "TensorSpec",
    "made_meanwhile",
]
