"""A run's state as JSON text that keeps arrays, tensors and bytes; nothing in it is a pickle.

A tensor is `{"instep": "tensor", "dtype": "bfloat16", "shape": [2, 3], "base64": "..."}`; an array is numpy's.
"""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

# The remedy where a sample holds another type.
SAVABLE = "keep numbers, strings, lists, dicts, bytes, arrays and tensors in samples and in the state of a data source"
_FIELDS = {"instep", "dtype", "shape", "base64"}


def to_text(value: Any) -> str:
    """Return the text of `value`. Its tensors come back on the CPU; as in JSON, tuples become lists and keys strings.

    Raises:
        TypeError, ValueError: an object in it is not a plain value, array or dense tensor.
    """
    return json.dumps(value, default=_encoded)


def from_text(text: str) -> Any:
    """Return the value that `to_text` got. Raises ValueError if the text cannot be read."""
    return json.loads(text, object_hook=_decoded)


def _encoded(value: Any) -> dict[str, Any]:
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")  # if they are not imported, it is not their type
    if torch is not None and isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_nested or value.is_meta:
            raise TypeError(f"a {type(value).__name__} is sparse, nested or without values, not a dense tensor")
        flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        raw, kind, dtype = flat.view(torch.uint8).numpy().tobytes(), "tensor", str(value.dtype).removeprefix("torch.")
    elif numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)) and value.dtype.kind not in "OV":
        raw, kind, dtype = value.tobytes(), "array", value.dtype.str
    elif isinstance(value, bytes):
        raw, kind, dtype = value, "bytes", "uint8"
    else:
        raise TypeError(f"a {type(value).__name__} is not a plain value, array or dense tensor")
    shape = [len(raw)] if kind == "bytes" else list(value.shape)
    return {"instep": kind, "dtype": dtype, "shape": shape, "base64": base64.b64encode(raw).decode("ascii")}


def _decoded(entry: dict[str, Any]) -> Any:
    if entry.keys() != _FIELDS:
        return entry
    import numpy

    try:
        raw = bytearray(base64.b64decode(entry["base64"], validate=True))
        if entry["instep"] == "bytes":
            return bytes(raw)
        if entry["instep"] == "array":
            if (dtype := numpy.dtype(entry["dtype"])).kind in "OV":  # their bits would be pointers
                raise ValueError(f"arrays of {dtype} cannot be saved")
            return numpy.ndarray(entry["shape"], dtype, raw)[()]
        import torch

        flat = torch.from_numpy(numpy.ndarray(len(raw), numpy.uint8, raw))
        return flat.view(vars(torch)[entry["dtype"]]).reshape(entry["shape"])  # getattr would import some names
    except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError) as error:
        raise ValueError(f"not a {entry['instep']!r:.20}: {error}") from error
