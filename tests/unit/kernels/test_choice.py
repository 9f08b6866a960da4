"""Which kernel is chosen: the user's wish, FlagOS' order, what a target supports; and what explain says of it."""

import pytest

from flagos_backend.devices.target import HOST, Target
from flagos_backend.errors import KernelPolicyInvalid, KernelRefused, UnsupportedOpcode
from flagos_backend.ir.attributes import CustomCallAttributes, DotAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels import choice
from flagos_backend.kernels.choice import choose, implementations_of
from flagos_backend.kernels.flaggems.loading import version_problem
from flagos_backend.kernels.implementation import Implementation, Provider, Variant, operation_of
from flagos_backend.kernels.policy import Policy

CHIP = Target("cpu", vendor="nvidia")  # no device is touched: nothing is measured on host memory


def dot(element=ElementType.F32):
    builder = Builder("dot")
    operands = [builder.parameter(ArrayShape(element, dims)) for dims in ((4, 5), (5, 6))]
    return builder.add(Opcode.DOT, operands, DotAttributes((1,), (0,)), shape=ArrayShape(element, (4, 6)))


@pytest.fixture
def providers(monkeypatch):
    """A table in which every provider computes dot: kernels that return their provider's name."""

    def implementation(provider):
        variants = (Variant("", lambda run, *operands: provider),)
        library = provider is Provider.VENDOR
        return Implementation("dot", provider, lambda i, t: "", lambda i, t: variants, library=library)

    table = {"dot": tuple(implementation(p) for p in (Provider.VENDOR, Provider.FLAGOS, Provider.TRITON))}
    monkeypatch.setattr(choice, "_tables", lambda: table)


def chosen(variables, target=CHIP):
    return choose(dot(), target, Policy.from_environment(variables))


@pytest.mark.parametrize(
    ("variables", "provider"),
    [
        ({}, Provider.FLAGOS),
        ({"FLAGOS_PREFER": "vendor"}, Provider.VENDOR),
        ({"FLAGOS_PREFER": "triton|vendor"}, Provider.TRITON),
        ({"FLAGOS_PREFER": "reference"}, Provider.REFERENCE),
        ({"FLAGOS_PREFER": "vendor:nvidia"}, Provider.VENDOR),
        ({"FLAGOS_PREFER": "vendor:ascend"}, Provider.FLAGOS),
        ({"FLAGOS_PREFER": "impl:triton.dot"}, Provider.TRITON),
        ({"FLAGOS_PREFER": "flagos", "FLAGOS_PER_OP": "sort=flagos;dot=vendor|flagos"}, Provider.VENDOR),
        ({"FLAGOS_PREFER": "vendor|triton", "FLAGOS_DENY_VENDORS": "nvidia"}, Provider.TRITON),
        ({"FLAGOS_PREFER": "vendor|triton", "FLAGOS_DENY_VENDORS": "*"}, Provider.TRITON),
        ({"FLAGOS_PREFER": "vendor|triton", "FLAGOS_ALLOW_VENDORS": "ascend"}, Provider.TRITON),
        ({"FLAGOS_PREFER": "vendor|triton", "FLAGOS_ALLOW_VENDORS": "ascend,nvidia"}, Provider.VENDOR),
        ({"FLAGOS_FLAGOS_BLACKLIST": "dot"}, Provider.TRITON),
        ({"FLAGOS_FLAGOS_WHITELIST": "sort"}, Provider.TRITON),
        ({"FLAGOS_FLAGOS_WHITELIST": "sort,dot"}, Provider.FLAGOS),
        ({"USE_FLAGGEMS": "0"}, Provider.TRITON),
        ({"VLLM_FL_PREFER": "vendor"}, Provider.VENDOR),
        ({"TE_FL_PER_OP": f"dot=vendor:{CHIP.device_type}|flagos"}, Provider.VENDOR),
        ({"SGLANG_FL_PREFER": "vendor", "SGLANG_FL_DENY_VENDORS": CHIP.device_type}, Provider.FLAGOS),
    ],
)
def test_wishes(providers, variables, provider):
    assert chosen(variables).provider is provider


def test_strict_refuses_instead_of_taking_another(providers):
    with pytest.raises(KernelRefused, match=r"dot.*vendor:ascend is preferred and has no kernel"):
        chosen({"FLAGOS_PREFER": "vendor:ascend", "FLAGOS_STRICT": "1"})


def test_strict_tries_every_wish(providers):
    assert chosen({"FLAGOS_PREFER": "vendor:ascend|triton", "FLAGOS_STRICT": "1"}).provider is Provider.TRITON


def test_without_vendors_no_reference_that_is_the_vendors(monkeypatch):
    """The reference kernel of dot is the vendor's library as well."""
    monkeypatch.setattr(choice, "_tables", dict)
    assert chosen({}).provider is Provider.REFERENCE
    with pytest.raises(KernelRefused, match="FLAGOS_DENY_VENDORS excludes the libraries of nvidia"):
        chosen({"FLAGOS_DENY_VENDORS": "*"})
    assert chosen({"FLAGOS_DENY_VENDORS": "*"}, HOST).provider is Provider.REFERENCE


def test_kernels_that_tune_themselves_are_measured_only_when_there_is_time(monkeypatch):
    def implementation(provider, tunes):
        variants = (Variant("", lambda run, *operands: provider),)
        return Implementation("dot", provider, lambda i, t: "", lambda i, t: variants, tunes_itself=lambda i: tunes)

    table = {"dot": (implementation(Provider.FLAGOS, True), implementation(Provider.VENDOR, False))}
    monkeypatch.setattr(choice, "_tables", lambda: table)
    assert chosen({}).provider is Provider.VENDOR
    assert "not flagos.dot: it tunes itself" in chosen({}).text
    assert chosen({"FLAGOS_PREFER": "flagos"}).provider is Provider.FLAGOS
    measured = []
    monkeypatch.setattr(
        choice.tuning,
        "fastest",
        lambda i, t, kernels, *_: measured.extend(kernels) or choice.tuning.Outcome(measured[-1], ""),
    )
    assert chosen({"FLAGOS_AUTOTUNE_SECONDS": "60"}).provider is Provider.VENDOR
    assert measured == ["flagos.dot", "vendor.dot"]


def test_a_reference_that_is_one_call_takes_part(monkeypatch):
    """ATen's own kernel of an operator is as good as any."""
    builder = Builder("c")
    x = builder.parameter(ArrayShape(ElementType.F32, (4,)))
    config = b'{"arguments": [{"tensor": 0}], "keywords": {}, "results": null}'
    attributes = CustomCallAttributes("aten::exp.default", config)
    call = builder.add(Opcode.CUSTOM_CALL, [x], attributes, shape=ArrayShape(ElementType.F32, (4,)))
    gems = Implementation("aten", Provider.FLAGOS, lambda i, t: "", lambda i, t: (Variant("", lambda run, x: x),))
    monkeypatch.setattr(choice, "_tables", lambda: {"aten::*": (gems,)})
    measured = []
    monkeypatch.setattr(
        choice.tuning,
        "fastest",
        lambda i, t, kernels, *_: measured.extend(kernels) or choice.tuning.Outcome(measured[-1], ""),
    )
    assert choose(call, CHIP, Policy()).provider is Provider.REFERENCE
    assert measured == ["flagos.aten", "reference.aten"]


def test_text_says_why(providers):
    text = chosen({"FLAGOS_DENY_VENDORS": "nvidia"}).text
    assert text.startswith("flagos.dot")
    assert "not measured: the device is the host's memory" in text
    assert "not vendor.dot: FLAGOS_DENY_VENDORS excludes the libraries of nvidia" in text


def test_what_nobody_has_raises_the_reference_kernels_error():
    instruction = Builder("c").add(Opcode.AFTER_ALL, ())
    with pytest.raises(UnsupportedOpcode):
        choose(instruction, CHIP, Policy())


def test_order_is_that_of_flagos():
    providers = [one.provider for one in implementations_of("flagos.attention")]
    assert providers == [Provider.FLAGOS, Provider.TRITON, Provider.VENDOR, Provider.REFERENCE]
    assert [one.provider for one in implementations_of("aten::_softmax")] == [Provider.FLAGOS, Provider.REFERENCE]


def test_operations():
    call = Builder("c").add(
        Opcode.CUSTOM_CALL, (), CustomCallAttributes("aten::add.Tensor"), shape=ArrayShape(ElementType.F32)
    )
    assert operation_of(call) == "aten::add"
    assert operation_of(dot()) == "dot"


@pytest.mark.parametrize(
    "variables",
    [
        {"FLAGOS_PREFER": "cuda"},
        {"FLAGOS_PER_OP": "dot"},
        {"FLAGOS_PER_OP": "dot=cuda"},
        {"FLAGOS_STRICT": "maybe"},
        {"FLAGOS_AUTOTUNE_SECONDS": "soon"},
        {"FLAGOS_AUTOTUNE_SECONDS": "-1"},
    ],
)
def test_invalid_variables(variables):
    with pytest.raises(KernelPolicyInvalid, match=next(iter(variables))):
        Policy.from_environment(variables)


@pytest.mark.parametrize(
    ("flag_gems", "triton", "problem"),
    [
        ("5.0.2", "3.6.0", ""),
        ("5.0.2", "3.5.1", ""),
        ("5.0.2", "3.7.0", "up to 3.6"),
        ("5.0.2", "3.9.0", "up to 3.6"),
        ("4.2.0", "3.6.0", "older than 5.0"),
        ("5.0.2", "", "needs Triton"),
    ],
)
def test_versions_of_flaggems(monkeypatch, flag_gems, triton, problem):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = version_problem(flag_gems, triton)
    assert problem in found if problem else not found
