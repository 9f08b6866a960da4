"""List the devices of the platform flagos and their memories."""

from __future__ import annotations

import argparse

from flagos_backend.cli.session import open_context
from plugin_abi.host import Context
from plugin_abi.isolation import DENIED_ATTRIBUTE, PROCESS_ATTRIBUTE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Takes none."""


def run(options: argparse.Namespace) -> int:
    with open_context() as context:
        lines = describe_devices(context)
    print("\n".join(lines))
    return 0 if lines else 1


def describe_devices(context: Context) -> list[str]:
    """One line for each device, and one for the runtime below them."""
    lines = [context.platform_version]
    for device in context.devices:
        kinds = ", ".join(memory.kind for memory in device.memories) if device.is_addressable else "other process"
        lines.append(f"{device.to_string}: {device.kind}, process {device.process_index}, memories: {kinds}")
        if device.is_addressable:
            stats = device.memory_stats()
            limit = "unknown" if stats.bytes_limit < 0 else f"{stats.bytes_limit / 2**30:.1f} GiB"
            lines.append(f"  {stats.bytes_in_use} bytes in use, limit {limit}")
    lines += _own_process(context)
    return lines


def _own_process(context: Context) -> list[str]:
    """Where the backend runs, and what it was denied there, if it has a process of its own."""
    attributes = context.devices[0].attributes if context.devices else {}
    if PROCESS_ATTRIBUTE not in attributes:
        return []
    process, denied = attributes[PROCESS_ATTRIBUTE], attributes.get(DENIED_ATTRIBUTE)
    told = denied if isinstance(denied, str) else "nothing"
    return [f"in a process of its own ({process!r}), which was denied {told}"]
