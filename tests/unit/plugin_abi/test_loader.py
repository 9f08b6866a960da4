"""The loader with sound plugins: one is accepted, the best one, once, and its table works."""

from __future__ import annotations

from plugin_abi import loader
from unit.plugin_abi.plugins import Plugins


def test_a_sound_backend_is_accepted(plugins: Plugins) -> None:
    manifest = plugins.add()
    result = loader.load(environment=plugins.environment())
    assert result.refusals == ()
    assert result.accepted is not None
    assert result.accepted.manifest is not None and result.accepted.manifest.path == manifest
