"""Programs whose steps wait for other devices or for Python."""

from __future__ import annotations

ALL_REDUCE = """HloModule sums
add { a = f32[] parameter(0)  b = f32[] parameter(1)  ROOT c = f32[] add(a, b) }
ENTRY main {
  x = f32[4] parameter(0)
  root = f32[4] sqrt(x)
  ROOT sum = f32[4] all-reduce(root), replica_groups={{0,1,2}}, use_global_device_ids=true, channel_id=1, to_apply=add
}"""
CALLBACK = """HloModule calls
ENTRY main {
  x = f32[3] parameter(0)
  n = u8[] parameter(1)
  called = (f32[3], s32[2]) custom-call(x, n), custom_call_target="flagos.host_callback", backend_config="{\\"id\\": 7}", custom_call_has_side_effect=true
  ROOT result = (f32[3], s32[2]) copy(called)
}"""  # noqa: E501
