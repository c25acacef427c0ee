# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests element types, shapes and devices by the names of frameworks, and the texts of signatures and `help()`."""

from __future__ import annotations

import array
import inspect
import re
import sys
import types

import mpgpu
import mpgpu.typing
import numpy
import pytest


def test_an_element_type_has_the_names_that_numpy_has_for_it():
    for name in ("f4", "<f4", "=f4", ">f4", "|u1", "?", "b1", "half", "double", "int", "M8[s]", "U3", "S5", ">i8", "c16", "float32", float):
        buffer = mpgpu.empty(3, name)
        assert buffer.numpy().dtype == numpy.dtype(name), name
        assert buffer.nbytes == 3 * numpy.dtype(name).itemsize


@pytest.mark.parametrize("dtype", ["bool", "uint8", "float16", ">f4", "complex64", "M8[s]", "bfloat16", "float8_e5m2"])
def test_the_type_that_a_buffer_returns_makes_another_one_of_this_type(dtype):
    first = mpgpu.empty(3, dtype)
    second = mpgpu.empty(3, first.dtype)
    assert (second.dtype, second.itemsize, second.nbytes) == (first.dtype, first.itemsize, first.nbytes)


def test_bfloat16_is_that_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for dtype in ("bfloat16", ml_dtypes.bfloat16, numpy.dtype(ml_dtypes.bfloat16)):
        buffer = mpgpu.empty((2, 3), dtype)
        assert (buffer.dtype, buffer.nbytes) == ("bfloat16", 12)
        assert (buffer.numpy().dtype, buffer.numpy().shape) == (ml_dtypes.bfloat16, (2, 3))
        source = numpy.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3)
        mpgpu.copy(buffer, source)
        assert (buffer.numpy() == source).all()


class LikeTorch:
    """Substitute for a device of torch, with the attributes that mpgpu uses."""

    def __init__(self, kind, index=None):
        self.type, self.index = kind, index

    def __str__(self):
        return self.type if self.index is None else f"{self.type}:{self.index}"


@pytest.mark.parametrize(
    ("device", "number"),
    [("cuda:1", 1), ("gpu2", 2), ("cuda", 0), ("cpu", mpgpu.HOST), ("host", mpgpu.HOST), (LikeTorch("cuda", 3), 3), (LikeTorch("cpu"), -1)],
)
def test_a_device_may_be_named_wherever_one_is_given(device, number):
    context = mpgpu.default_context()
    assert mpgpu.empty(4, device=device).device == number
    assert mpgpu.Stream(device).device == number
    assert context.uuid(device) == context.uuid(number)
    assert context.device_statistics(device) == context.device_statistics(number)


def test_relays_and_the_gpus_of_a_rank_may_be_named():
    context = mpgpu.Context(topology="beluga")
    a, b = (context.empty(64 << 20, device=gpu) for gpu in ("cuda:0", "cuda:1"))
    assert mpgpu.Plan([(b, a)], host_path=False, relay_gpus=["cuda:2"]).info.paths == 2
    node = mpgpu.Node(rank=0, ranks=1, allgather=lambda own: [own], devices=["cuda:1", 2])
    assert (node.device, node.devices) == (1, [1, 2])


class OnlyDlpack:
    def __init__(self, owner):
        self.owner = owner

    def __dlpack_device__(self):
        return self.owner.__dlpack_device__()

    def __dlpack__(self, **arguments):
        return self.owner.__dlpack__(**arguments)


class OnlyInterface:
    def __init__(self, owner):
        self.owner = owner
        self.__array_interface__ = owner.__array_interface__


F = numpy.arange(12, dtype="f4")
UNLIKE = {
    "another type": (numpy.zeros(12, "i4"), F, "dst is <i4 of shape (12,) and src <f4 of shape (12,)"),
    "another byte order": (numpy.zeros(12, ">f4"), F, "dst is >f4"),
    "another shape": (numpy.zeros((3, 4), "f4"), F, "dst is <f4 of shape (3, 4) and src <f4 of shape (12,)"),
    "a typed buffer": (mpgpu.empty(12, "i4"), F, "dst is <i4"),
    "a typed buffer of a GPU": (mpgpu.empty(12, "i4", "cuda:0"), mpgpu.empty(12, "f4"), "dst is <i4"),
    "rows of a buffer": (mpgpu.empty((6, 4), "f4")[2:5], F, "of shape (3, 4)"),
    "bytes as numbers": (numpy.zeros(48, "u1"), F, "dst is |u1 of shape (48,)"),
    "the buffer protocol": (array.array("i", bytes(48)), F, "dst is <i4"),
    "DLPack": (OnlyDlpack(numpy.zeros(12, "i4")), F, "dst is <i4"),
    "an interface": (OnlyInterface(numpy.zeros(12, "i4")), F, "dst is <i4"),
    "fields": (numpy.zeros(6, [("a", "i4"), ("b", "f4")]), numpy.zeros(6, [("a", "f4"), ("b", "i4")]), "dst is [('a', '<i4')"),
}


@pytest.mark.parametrize("case", UNLIKE)
def test_unlike_types_and_shapes_are_refused_unless_bytes_are_asked_for(case):
    dst, src, text = UNLIKE[case]
    with pytest.raises(mpgpu.ArgumentError, match=re.escape(text)) as caught:
        mpgpu.copy(dst, src)
    assert "pass as_bytes=True" in str(caught.value)
    with pytest.raises(mpgpu.ArgumentError, match=r"^transfer 1: "):
        mpgpu.Plan([(bytearray(8), bytes(8)), (dst, src)])
    mpgpu.copy(dst, src, as_bytes=True)
    plain = dst.owner if hasattr(dst, "owner") else dst
    assert memoryview(numpy.asarray(plain)).tobytes() == memoryview(numpy.asarray(src)).tobytes()


def test_what_has_no_type_fits_all():
    for raw in (bytearray(48), memoryview(bytearray(48)), mpgpu.empty(48), mpgpu.empty(48, device="cuda:1"), mpgpu.empty(48)[:]):
        back = numpy.zeros(12, "f4")
        mpgpu.copy(raw, F)
        mpgpu.copy(back, raw)
        assert (back == F).all()


def test_the_same_type_by_another_protocol_is_no_other_type():
    for src in (array.array("f", F.tobytes()), OnlyDlpack(F.copy()), OnlyInterface(F), mpgpu.empty(12, float and "float32")):
        dst = mpgpu.empty(12, "<f4", device="cuda:0")
        mpgpu.copy(dst, src)
    assert mpgpu.Plan([(numpy.zeros(3, "M8[s]"), numpy.ones(3, "M8[s]"))]).info.bytes == 24


# --- help() and signatures ------------------------------------------------------------------------------------------------------
PUBLIC = {name: getattr(mpgpu, name) for name in mpgpu.__all__}


def functions(name, value):
    """Yields a public function with its name, or the constructor and methods of a public class with their names."""
    if isinstance(value, types.FunctionType):
        yield name, value
    elif isinstance(value, type):
        for inner, member in vars(value).items():
            if isinstance(member, types.FunctionType) and (inner == "__init__" or not inner.startswith("_")):
                yield f"{name}.{inner}", member


FUNCTIONS = dict(each for name, value in PUBLIC.items() for each in functions(name, value))
# Constructors of objects that other calls create. The documentation of these calls describes the objects.
MADE_BY_OTHERS = {"Arrival.__init__", "SentEntry.__init__", "NodePlan.__init__", "Message.__init__", "Request.__init__", "Error.__init__"}


def test_help_of_everything_public_says_something():
    silent = [
        f"{name}.{inner}"
        for name, value in PUBLIC.items()
        if isinstance(value, type)
        for inner, member in vars(value).items()
        if not inner.startswith("_") and (isinstance(member, (types.FunctionType, property)) and not inspect.getdoc(member))
    ]
    silent += [name for name, value in PUBLIC.items() if callable(value) and not value.__doc__]
    assert silent == []


def help_of(name):
    """Returns the documentation of a function together with the texts to which it refers.

    For a constructor, this is the text of its class, which `help` shows first.
    """
    owner = PUBLIC[name.partition(".")[0]]
    text = inspect.getdoc(owner if name.endswith(".__init__") else FUNCTIONS[name]) or ""
    for other in re.findall(r":(?:class|meth|func):`([\w.]+)`", text):
        found = PUBLIC.get(other) or FUNCTIONS.get(other) or getattr(owner, other, None)
        text += (inspect.getdoc(found) or "") if found is not None else ""
    return text


@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - MADE_BY_OTHERS))
def test_help_names_every_argument(name):
    arguments = [each for each in inspect.signature(FUNCTIONS[name]).parameters if each != "self"]
    assert [each for each in arguments if not re.search(rf"\b{each}\b", help_of(name))] == []


@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - MADE_BY_OTHERS))
def test_signatures_say_what_they_take(name):
    taken = {argument: str(kind) for argument, kind in FUNCTIONS[name].__annotations__.items() if argument != "return"}
    assert [argument for argument, kind in taken.items() if re.search(r"\bAny\b", kind)] == []


def test_types_of_signatures_can_be_asked_for():
    if sys.version_info < (3, 10):
        pytest.skip("`X | Y` of signatures is evaluated from Python 3.10 on")
    import typing

    assert typing.get_type_hints(mpgpu.copy)["dst"] == mpgpu.typing.Array
    assert typing.get_type_hints(mpgpu.Buffer.__init__)["device"] == mpgpu.typing.Device
