"""A reader of the pickles inside PyTorch weight files that cannot run code.

Python's own unpickler calls what the file tells it to. This one knows the few
instructions that `torch.save` writes for a dictionary of tensors and the few names they
refer to, gives values of its own for those names, and refuses all others.
"""

import pickletools
from typing import Any, BinaryIO, NamedTuple

import numpy as np

# What a storage class holds, as NumPy names it.
STORAGE_DTYPES = {
    "torch.DoubleStorage": "<f8",
    "torch.FloatStorage": "<f4",
    "torch.HalfStorage": "<f2",
    "torch.BFloat16Storage": "<u2",
    "torch.LongStorage": "<i8",
    "torch.IntStorage": "<i4",
    "torch.ShortStorage": "<i2",
    "torch.CharStorage": "i1",
    "torch.ByteStorage": "u1",
    "torch.BoolStorage": "?",
}
_REBUILD_TENSOR = {
    "torch._utils._rebuild_tensor",  # before PyTorch 0.4
    "torch._utils._rebuild_tensor_v2",
}
_ORDERED_DICT = "collections.OrderedDict"
_ALLOWED = {_ORDERED_DICT, *_REBUILD_TENSOR, *STORAGE_DTYPES}

# A tensor takes about 40. Bounds the time that a file can cost.
_MAX_INSTRUCTIONS = 1_000_000


class Global(NamedTuple):
    """A name that the file refers to, not what it stands for.

    Args:
        name: Module and name, such as `"collections.OrderedDict"`.
    """

    name: str


class Storage(NamedTuple):
    """One-dimensional data that lies elsewhere in the file.

    Args:
        key: Its name in the file.
        kind: Its class, a key of `STORAGE_DTYPES`.
        size: Number of its elements.
    """

    key: str
    kind: str
    size: int

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return np.dtype(STORAGE_DTYPES[self.kind]).itemsize


class Tensor(NamedTuple):
    """A view of a storage. The file's word: nothing is checked yet but the storage.

    Args:
        storage: The data.
        offset: Element of the storage at which the tensor starts.
        shape: Its shape.
        strides: Elements from one index to the next, for each axis.
    """

    storage: Storage
    offset: Any
    shape: Any
    strides: Any


class _Machine:
    """The stack and the memo of a pickle."""

    def __init__(self):
        self.stack, self.marks, self.memo = [], [], {}

    def pop_to_mark(self) -> list:
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def set_items(self, values: list) -> None:
        _fill(self.stack[-1], zip(values[::2], values[1::2], strict=True))

    def push_global(self, name: str) -> None:
        if name not in _ALLOWED:
            raise ValueError(
                f"it refers to {name[:100]!r}, which weights do not need and which "
                "could run code, so it was not read"
            )
        self.stack.append(Global(name))

    def execute(self, instruction: str, argument: Any) -> None:
        """Executes one instruction, named as in `pickletools`."""
        stack = self.stack
        match instruction:
            case "PROTO" | "FRAME":
                pass
            case "BINUNICODE" | "SHORT_BINUNICODE" | "BINSTRING" | "SHORT_BINSTRING":
                stack.append(argument)
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT":
                stack.append(argument)
            case "NONE":
                stack.append(None)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(instruction == "NEWTRUE")
            case "MARK":
                self.marks.append(len(stack))
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                values = [stack.pop() for _ in range(int(instruction[-1]))]
                stack.append(tuple(values[::-1]))
            case "TUPLE":
                stack.append(tuple(self.pop_to_mark()))
            case "EMPTY_LIST":
                stack.append([])
            case "APPEND":
                value = stack.pop()
                list.append(stack[-1], value)
            case "APPENDS":
                values = self.pop_to_mark()
                list.extend(stack[-1], values)
            case "EMPTY_DICT":
                stack.append({})
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                self.set_items([key, value])
            case "SETITEMS":
                self.set_items(self.pop_to_mark())
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = stack[-1]
            case "MEMOIZE":
                self.memo[len(self.memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self.memo[argument])
            case "GLOBAL" | "INST":
                self.push_global(argument.replace(" ", "."))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                self.push_global(f"{module:s}.{name:s}")
            case "BINPERSID":
                stack.append(_storage(*stack.pop()))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                stack.append(_reduce(function, *arguments))
            case "BUILD":
                # Attributes of a dictionary: `_metadata` of a state_dict.
                stack.pop()
            case _:
                raise ValueError(f"a dictionary of tensors needs no {instruction}")


def _fill(target: dict, items) -> None:
    for key, value in items:
        # Nothing else is hashed: a tuple of tuples could take for ever.
        if not isinstance(key, str):
            raise ValueError("a dictionary in it has a key that is not a string")
        dict.__setitem__(target, key, value)


def _storage(tag, kind, key, _location, size, view=None) -> Storage:
    is_known = isinstance(kind, Global) and kind.name in STORAGE_DTYPES
    if tag != "storage" or not is_known or view is not None:
        raise ValueError("it refers to data that is not a plain storage")
    if not isinstance(key, str) or type(size) is not int:
        raise ValueError("it refers to a storage without name and size")
    return Storage(key, kind.name, size)


def _reduce(function, *arguments) -> Any:
    """What calling a name of the file would give."""
    name = function.name
    if name == _ORDERED_DICT:
        items = {}
        _fill(items, *(arguments or [()]))  # Python 2 wrote the items as an argument
        return items
    if name in _REBUILD_TENSOR and isinstance(arguments[0], Storage):
        return Tensor(*arguments[:4])
    raise ValueError(f"it calls {name} in an unknown way")


def read_pickle(stream: BinaryIO) -> Any:
    """Reads one pickle of what `torch.save` writes.

    Args:
        stream: In-memory file at the start of a pickle; afterwards behind it.

    Returns:
        Numbers, strings, lists, tuples, dictionaries with string keys, and
        `Tensor`, `Storage` and `Global` records.

    Raises:
        ValueError: If the stream is not such a pickle. The other errors of broken
            input (`TypeError`, `LookupError`, `AttributeError`) are the caller's.
    """
    machine = _Machine()
    for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
        if opcode.name == "STOP":
            return machine.stack.pop()
        if count == _MAX_INSTRUCTIONS:
            raise ValueError(f"it has more than {_MAX_INSTRUCTIONS:,} instructions")
        machine.execute(opcode.name, argument)
    raise ValueError("it ends early")
