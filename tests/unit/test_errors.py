"""The catalogue of errors: numbers, messages, payloads."""

import re

import pytest

from flagos_backend import errors


def test_numbers_are_unique_and_ordered_by_stage():
    assert len(errors.CATALOGUE) == len({kind.__name__ for kind in errors.CATALOGUE.values()})
    assert all(100 <= number < 700 for number in errors.CATALOGUE)


@pytest.mark.parametrize("kind", errors.CATALOGUE.values(), ids=lambda kind: kind.__name__)
def test_every_message_states_its_facts(kind):
    facts = {field: f"<{field}>" for field in kind.fields}
    error = kind(**facts)
    message = str(error)
    assert all(value in message for value in facts.values())
    assert message.endswith(f"[FLAGOS-{kind.number}]")
    assert isinstance(kind.code, errors.StatusCode)
    assert kind.code is not errors.StatusCode.OK
    assert len(re.findall(r"\. [A-Z]", kind.template)) >= 1, "fact, place and cure are sentences"
    assert error.payloads["flagos.error"] == kind.__name__.encode()
    assert all(error.payloads[f"flagos.{field}"] == value.encode() for field, value in facts.items())


def test_missing_and_extra_facts():
    with pytest.raises(TypeError, match=r"takes \['fact', 'place'\]"):
        errors.MalformedProgram(fact="x")
    with pytest.raises(TypeError):
        errors.MalformedProgram(fact="x", place="y", more="z")


def test_a_number_cannot_be_used_twice():
    with pytest.raises(TypeError, match="share the error number 101"):
        type(
            "Impostor",
            (errors.FlagosBackendError,),
            {"number": 101, "code": errors.StatusCode.INTERNAL, "template": "{place}"},
        )
    assert errors.CATALOGUE[101] is errors.MalformedProgram


def test_facts_that_are_no_text():
    error = errors.MalformedProgram(fact="bad \udcff\0", place=7)
    assert error.payloads["flagos.fact"] == rb"bad \udcff\x00"
    assert error.facts["place"] == "7"
