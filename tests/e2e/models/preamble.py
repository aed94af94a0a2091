"""What every model.py of these begins with."""

from __future__ import annotations

PREAMBLE = """
import asyncio, json, os, sys, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

def tensor(request, name="IN"):
    return pb_utils.get_input_tensor_by_name(request, name)

def response(array, name="OUT", **options):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, np.asarray(array))], **options)

def number(value=1.0, **options):
    return response(np.array([value], np.float32), **options)

def text(value):
    return response(np.array([value if isinstance(value, str) else json.dumps(value)], object),
                    "TEXT")

def failed(message, code="INTERNAL"):
    error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, code))
    return pb_utils.InferenceResponse(error=error)

def raised(function, *args, **options):
    try:
        return function(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def bls(name, request_id="", outputs=(), inputs=None, **options):
    if inputs is None:
        inputs = [pb_utils.Tensor("IN", np.array([1, 2], np.float32))]
    return pb_utils.InferenceRequest(request_id=request_id, model_name=name, inputs=inputs,
                                     requested_output_names=list(outputs), **options)

def shown(answer):
    if answer.has_error():
        return [str(answer.error().code()), answer.error().message(), answer.parameters()]
    return [[t.name(), list(t.shape()), str(t.as_numpy().tolist())] for t in answer.output_tensors()
            ] + [answer.parameters()]
"""

# `execute` runs the method that the id of the request names, for each request by itself.
BY_ID = """
class TritonPythonModel:
    def execute(self, requests):
        return [getattr(self, r.request_id())(r) for r in requests]
"""
