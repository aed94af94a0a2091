"""Numbers of the Ascend runtime. pyACL defines no constants: the application brings them.

Source: `acl_base_rt.h`, `acl_rt.h`, `acl_mdl.h` and `error_codes/*.h` of CANN.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

SUCCESS = 0
REPEAT_INITIALIZE = 100002
REPEAT_FINALIZE = 100037

MALLOC_HUGE_FIRST = 0

# Name of the extra input of a model with gears, and of a dynamic-AIPP parameter input.
DYNAMIC_TENSOR_NAME = "ascend_mbatch_shape_data"
DYNAMIC_AIPP_NAME = "ascend_dynamic_aipp_data"

# What `get_aipp_type` says of an image input whose AIPP settings are given at run time.
WITH_DYNAMIC_AIPP = 2

# "Any input" in the gear queries of pyACL; wraps to the largest unsigned value.
ANY_INPUT = -1

UNKNOWN_DIM = -1


class MemcpyKind(IntEnum):
    """Direction of a copy."""

    HOST_TO_HOST = 0
    HOST_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    DEVICE_TO_DEVICE = 3


class CoreKind(IntEnum):
    """What `set_*_res_limit` limits."""

    CUBE = 0
    VECTOR = 1


class MemoryAttribute(IntEnum):
    """What `get_mem_info` reports on; parts without HBM answer HBM from DDR."""

    DDR = 0
    HBM = 1


# Flag of an event that streams wait for.
EVENT_SYNC = 0x1


# aclDataType → wire datatype. Absent numbers (strings, complex, sub-byte, FP8) are not served.
DATATYPE_BY_ACL: dict[int, str] = {
    0: "FP32", 1: "FP16", 2: "INT8", 3: "INT32", 4: "UINT8", 6: "INT16", 7: "UINT16",
    8: "UINT32", 9: "INT64", 10: "UINT64", 11: "FP64", 12: "BOOL", 27: "BF16",
}  # fmt: skip


class CodeInfo(NamedTuple):
    """Name of a return code, and what to do about it ("" when nothing general can be said)."""

    name: str
    hint: str = ""


_ENVIRONMENT = "source the set_env.sh of CANN before Python starts"
_FOREIGN_FILE = "the .om file is damaged or was compiled for another chip or CANN version"
_GEAR = "only the gears the model was compiled with are valid"
_SERVER_BUG = "the thread has no context of the device: a bug of whoever made the call"
_OUT_OF_MEMORY = (
    "free device memory: fewer instances, smaller models, or other processes on the card"
)
_POISONED = "the context is unusable after a device exception; it is torn down and made again"

CODES: dict[int, CodeInfo] = {
    100000: CodeInfo("INVALID_PARAM"),
    100001: CodeInfo("UNINITIALIZE", "acl.init was not called in this process"),
    100002: CodeInfo("REPEAT_INITIALIZE"),
    100003: CodeInfo("INVALID_FILE", "check the path and its permissions"),
    100011: CodeInfo("INVALID_MODEL_ID", "the model was unloaded or belongs to another process"),
    100012: CodeInfo("DESERIALIZE_MODEL", _FOREIGN_FILE),
    100013: CodeInfo("PARSE_MODEL", _FOREIGN_FILE),
    100014: CodeInfo("READ_MODEL_FAILURE", _FOREIGN_FILE),
    100015: CodeInfo("MODEL_SIZE_INVALID", _FOREIGN_FILE),
    100017: CodeInfo("MODEL_INPUT_NOT_MATCH"),
    100018: CodeInfo("MODEL_OUTPUT_NOT_MATCH"),
    100019: CodeInfo("MODEL_NOT_DYNAMIC"),
    100026: CodeInfo("UNSUPPORTED_DATA_TYPE"),
    100037: CodeInfo("REPEAT_FINALIZE"),
    100038: CodeInfo("NOT_STATIC_AIPP"),
    100039: CodeInfo(
        "COMPILING_STUB_MODE",
        "LD_LIBRARY_PATH finds the stub libraries (devlib, stub) first; remove them",
    ),
    107000: CodeInfo("RT_PARAM_INVALID"),
    107001: CodeInfo("RT_INVALID_DEVICEID", "see npu-smi info and ASCEND_RT_VISIBLE_DEVICES"),
    107002: CodeInfo("RT_CONTEXT_NULL", _SERVER_BUG),
    107003: CodeInfo("RT_STREAM_CONTEXT", _SERVER_BUG),
    107004: CodeInfo("RT_MODEL_CONTEXT", _SERVER_BUG),
    107008: CodeInfo("RT_ADDR_UNALIGNED"),
    107015: CodeInfo("RT_STREAM_NO_CB_REG"),
    107017: CodeInfo("RT_INVALID_HANDLE"),
    107019: CodeInfo("RT_WAIT_TIMEOUT"),
    107020: CodeInfo("RT_TASK_TIMEOUT"),
    107022: CodeInfo("RT_DEVICE_TASK_ABORT"),
    107023: CodeInfo("RT_STREAM_ABORT"),
    145000: CodeInfo("GE_PARAM_INVALID"),
    145001: CodeInfo("GE_EXEC_NOT_INIT"),
    145002: CodeInfo("GE_EXEC_MODEL_PATH_INVALID"),
    145003: CodeInfo("GE_EXEC_MODEL_ID_INVALID"),
    145006: CodeInfo("GE_EXEC_MODEL_DATA_SIZE_INVALID", _FOREIGN_FILE),
    145009: CodeInfo("GE_EXEC_LOAD_MODEL_REPEATED"),
    145011: CodeInfo("GE_DYNAMIC_INPUT_ADDR_INVALID"),
    145012: CodeInfo("GE_DYNAMIC_INPUT_LENGTH_INVALID", _GEAR),
    145013: CodeInfo("GE_DYNAMIC_BATCH_SIZE_INVALID", _GEAR),
    145015: CodeInfo("GE_AIPP_NOT_EXIST"),
    145020: CodeInfo("GE_FORMAT_INVALID"),
    145021: CodeInfo("GE_SHAPE_INVALID"),
    145022: CodeInfo("GE_DATATYPE_INVALID"),
    148049: CodeInfo("INVALID_OPP_PATH", _ENVIRONMENT),
    148050: CodeInfo("OP_UNSUPPORTED_DYNAMIC"),
    148051: CodeInfo("RELATIVE_RESOURCE_NOT_CLEARED"),
    148053: CodeInfo("INVALID_BUNDLE_MODEL_ID"),
    200000: CodeInfo("BAD_ALLOC", "host memory ran out"),
    200001: CodeInfo("API_NOT_SUPPORT"),
    200002: CodeInfo("INVALID_DEVICE", "see npu-smi info"),
    200003: CodeInfo("MEMORY_ADDRESS_UNALIGNED"),
    200005: CodeInfo("INVALID_RESOURCE_HANDLE"),
    200006: CodeInfo("FEATURE_UNSUPPORTED"),
    207000: CodeInfo("RT_FEATURE_NOT_SUPPORT", "the chip or its driver is too old"),
    207001: CodeInfo("RT_MEMORY_ALLOCATION", _OUT_OF_MEMORY),
    207004: CodeInfo("RT_NO_DEVICE", "no card is visible to this process"),
    207005: CodeInfo("RT_RESOURCE_ALLOC_FAIL"),
    207006: CodeInfo("RT_NO_PERMISSION", "the device node cannot be opened in this container"),
    207007: CodeInfo("RT_NO_EVENT_RESOURCE"),
    207008: CodeInfo("RT_NO_STREAM_RESOURCE"),
    207010: CodeInfo("RT_NO_MODEL_RESOURCE"),
    207018: CodeInfo("RT_DEVICE_OOM", _OUT_OF_MEMORY),
    245000: CodeInfo("GE_MEMORY_ALLOCATION", _OUT_OF_MEMORY),
    245001: CodeInfo("GE_MEMORY_OPERATE_FAILED"),
    245002: CodeInfo("GE_DEVICE_MEMORY_OPERATE_FAILED"),
    300000: CodeInfo("STORAGE_OVER_LIMIT"),
    500000: CodeInfo("INTERNAL_ERROR"),
    500001: CodeInfo("FAILURE", "often a missing Python dependency of the operator compiler"),
    500002: CodeInfo("GE_FAILURE"),
    500003: CodeInfo("RT_FAILURE"),
    500004: CodeInfo("DRV_FAILURE", "driver and CANN must fit each other"),
    507008: CodeInfo("RT_SOC_VERSION", _FOREIGN_FILE),
    507009: CodeInfo("RT_TASK_TYPE_NOT_SUPPORT", "not supported on a slice (vNPU) of a card"),
    507010: CodeInfo("RT_LOST_HEARTBEAT", "the card is lost; see npu-smi info"),
    507011: CodeInfo("RT_MODEL_EXECUTE", _POISONED),
    507012: CodeInfo("RT_REPORT_TIMEOUT"),
    507014: CodeInfo("RT_AICORE_TIMEOUT", _POISONED),
    507015: CodeInfo("RT_AICORE_EXCEPTION", _POISONED),
    507017: CodeInfo("RT_AICPU_TIMEOUT", _POISONED),
    507018: CodeInfo("RT_AICPU_EXCEPTION", _POISONED),
    507033: CodeInfo("RT_DEV_SETUP_ERROR", "card busy, driver problem, or a forked process"),
    507034: CodeInfo("RT_VECTOR_CORE_TIMEOUT", _POISONED),
    507035: CodeInfo("RT_VECTOR_CORE_EXCEPTION", _POISONED),
    507046: CodeInfo("RT_STREAM_SYNC_TIMEOUT"),
    507047: CodeInfo("RT_EVENT_SYNC_TIMEOUT"),
    507053: CodeInfo("RT_DEVICE_MEM_ERROR", "hardware fault; take the card out of service"),
    507054: CodeInfo("RT_HBM_MULTI_BIT_ECC", "hardware fault; take the card out of service"),
    507899: CodeInfo("RT_DRV_INTERNAL_ERROR"),
    507901: CodeInfo("RT_SOCKET_CLOSE"),
    545000: CodeInfo("GE_INTERNAL_ERROR"),
    545001: CodeInfo("GE_LOAD_MODEL", _FOREIGN_FILE),
    545002: CodeInfo("GE_EXEC_LOAD_MODEL_PARTITION_FAILED", _FOREIGN_FILE),
    545003: CodeInfo("GE_EXEC_LOAD_WEIGHT_PARTITION_FAILED", _FOREIGN_FILE),
    545004: CodeInfo("GE_EXEC_LOAD_TASK_PARTITION_FAILED", _FOREIGN_FILE),
    545005: CodeInfo("GE_EXEC_LOAD_KERNEL_PARTITION_FAILED", _FOREIGN_FILE),
    545009: CodeInfo("GE_UNLOAD_MODEL"),
    545601: CodeInfo("GE_MODEL_EXECUTE_TIMEOUT"),
}


def is_device_exception(code: int) -> bool:
    """Whether later calls in the same context fail too, so that it has to be made again."""
    return 507000 <= code < 508000


def is_bad_request(code: int) -> bool:
    """Whether a gear or shape was asked for that the model does not have."""
    return code in (145011, 145012, 145013, 145020, 145021, 145022)


def is_out_of_resources(code: int) -> bool:
    """Whether the call may work once others have given something back."""
    return 207000 < code < 208000 or code in (200000, 245000)
