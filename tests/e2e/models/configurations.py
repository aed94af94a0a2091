"""Configurations of the models."""

from __future__ import annotations

CONFIG = """
backend: "python"
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""  # noqa: E501

DECOUPLED = CONFIG + "model_transaction_policy { decoupled: true }\n"

BATCHING = CONFIG.replace("backend:", "max_batch_size: 4 backend:")

SEQUENCES = BATCHING + (
    "sequence_batching { control_input [ "
    '{ name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] },'
    '{ name: "END" control [ { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } ] },'
    '{ name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] } ] '
    'state [ { input_name: "SI" output_name: "SO" data_type: TYPE_FP32 dims: [ 1 ] } ] }'
)

PAIRED = BATCHING + (
    "dynamic_batching { preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 10000000 }"
)

ITERATIVE = BATCHING + "sequence_batching { iterative_sequence: true }\n"
