"""What one thread of the process at a time does with its devices: capture a graph, measure kernels."""

from __future__ import annotations

import threading

#: A wait for the whole device, as FlagGems' kernels that tune themselves have them, breaks what any thread captures
#: there, and fails; and kernels that are measured side by side are in one another's times. So a capture waits until
#: others have measured, for seconds at most by default. Whoever holds it waits for no other thread.
device_lock = threading.Lock()
