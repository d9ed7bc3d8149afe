"""What differs from framework to framework: names of types, devices, streams, and new arrays. No framework is imported here."""
import functools
import sys

_NAMES = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "uint16": "bf16",  # NumPy's way to hold its bits
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "uint8": "u8",
    "int32": "i32",
    "int64": "i64",
}
_LONG = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "i32": "int32"}


def is_torch(array):
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


@functools.lru_cache(maxsize=64)
def _name_of(dtype):
    name = str(dtype).rsplit(".", 1)[-1]
    if name not in _NAMES:
        raise TypeError(f"imbrex has no element type for {dtype}")
    return _NAMES[name]


def exported(array):
    """What the library is given: of a torch tensor its DLPack capsule, since __dlpack__() is Python that takes microseconds and makes streams
    wait for each other; any other array as it is."""
    if array is None:
        return None
    return sys.modules["torch"].to_dlpack(array) if is_torch(array) else array


def dtype_name(array):
    """imbrex's name of an array's type: "bf16"."""
    return _name_of(array.dtype)


NO_BACKWARD = "imbrex has no backward pass: call it under torch.no_grad() or torch.inference_mode(), or give it detached tensors"


def no_gradient(*arrays):
    """Raises NotImplementedError for a torch tensor that requires a gradient, since there is no backward pass."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.is_grad_enabled() and any(is_torch(a) and a.requires_grad for a in arrays):
        raise NotImplementedError(NO_BACKWARD)


def device_name(array):
    """ "cpu" or "cuda:0"."""
    if is_torch(array):
        return "cpu" if array.device.type == "cpu" else f"cuda:{array.device.index or 0}"
    kind, index = array.__dlpack_device__()
    return f"cuda:{index}" if int(kind) in (2, 13) else "cpu"


@functools.lru_cache(maxsize=None)
def _current_stream():
    """A function that gives the address of PyTorch's current stream on the GPU of a number. PyTorch's public one makes an object first, which takes
    microseconds, so it serves only where the private one is gone."""
    torch = sys.modules["torch"]
    return getattr(torch._C, "_cuda_getCurrentRawStream", None) or (lambda gpu: torch.cuda.current_stream(gpu).cuda_stream)


def stream_address(stream, array, gpu=None):
    """What the library takes: of the stream that is given, else of the one that the array's framework would use now. gpu: the number of the
    one that an array of the host is for."""
    if stream is not None:
        return int(getattr(stream, "cuda_stream", getattr(stream, "ptr", stream)))
    if is_torch(array):
        if array.is_cuda:
            return _current_stream()(array.get_device())
        return 0 if gpu is None else sys.modules["torch"].cuda.current_stream(gpu).cuda_stream
    if type(array).__module__.split(".")[0] == "cupy":
        return sys.modules["cupy"].cuda.get_current_stream().ptr
    return 0


def empty(like, shape, dtype):
    """A new array of the framework and on the device of another one."""
    name = _LONG[dtype]
    if is_torch(like):
        return like.new_empty(shape, dtype=getattr(sys.modules["torch"], name))
    module = sys.modules.get(type(like).__module__.split(".")[0])
    if module is None or not hasattr(module, "empty") or type(like).__module__.startswith("jax"):
        raise TypeError(f"imbrex cannot make outputs for {type(like).__name__}: give out=")
    return module.empty(shape, dtype="uint16" if name == "bfloat16" else name)
