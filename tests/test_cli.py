"""Flags, their forms and their errors."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import npuserve
from npuserve import cli
from npuserve.errors import NotFoundError
from npuserve.flag_values import RateLimitResource, TraceOptions
from npuserve.options import SECTIONS, ServerOptions

REPOSITORY = "--model-repository=/repo"


def parsed(*words: str, **environ: str) -> ServerOptions:
    return cli.parse(words, environ)[0]


def refused(*words: str) -> cli.UsageError:
    with pytest.raises(cli.UsageError) as caught:
        cli.parse(words, {})
    return caught.value


def test_no_flags_are_triton_s_defaults() -> None:
    """An empty command line is an empty ServerOptions."""
    assert parsed() == ServerOptions()


@pytest.mark.parametrize(
    "words",
    [("--http-port=1",), ("--http-port", "1"), ("--http-po=1",), ("--http-po", "1")],
)
def test_a_value_may_follow_and_a_name_be_shortened(words: tuple[str, ...]) -> None:
    """All forms getopt_long knows."""
    assert parsed(*words).http_port == 1


def test_repeatable_flags_collect_and_others_take_the_last() -> None:
    """Also under their other name."""
    options = parsed("--model-repository=a", "--model-store=b", "--id=x", "--id=y")
    assert options.model_repository == ("a", "b")
    assert options.id == "y"


@pytest.mark.parametrize("text", ["true", "TRUE", "on", "1"])
def test_truth_has_three_spellings_in_any_case(text: str) -> None:
    """As have lies."""
    assert parsed(f"--reuse-http-port={text}").reuse_http_port is True


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--disable-auto-complete-config"], "disable_auto_complete_config", True),
        (["--strict-model-config=true"], "disable_auto_complete_config", True),
        (["--strict-model-config=false"], "disable_auto_complete_config", False),
        (["--log-verbose=true"], "log_verbose", 1),
        (["--metrics-interval-ms=0.5"], "metrics_interval_ms", 0.5),
        (["--grpc-max-connection-age=5"], "grpc_max_connection_age", 5),
        (["--sagemaker-safe-port-range=8000-9000"], "sagemaker_safe_port_range", (8000, 9000)),
        (["--response-cache-byte-size=7"], "cache_config", {"local": {"size": "7"}}),
        (["--cache-config=local,size=7"], "cache_config", {"local": {"size": "7"}}),
        (["--metrics-config=summary_quantiles=0.5:0.1"], "metrics_config",
         {"summary_quantiles": "0.5:0.1"}),
        (["--backend-config=python,shm=1", "--backend-config=python,x=a=b", "--backend-config=k=v"],
         "backend_config", {"python": {"shm": "1", "x": "a=b"}, "": {"k": "v"}}),
        (["--host-policy=p,cpu-cores=0-3"], "host_policy", {"p": {"cpu-cores": "0-3"}}),
        (["--http-restricted-api=health,trace:key=v"], "http_restricted_api",
         {"health": ("key", "v"), "trace": ("key", "v")}),
        (["--rate-limit-resource=R:4", "--rate-limit-resource=S:2:1"], "rate_limit_resource",
         (RateLimitResource("R", 4), RateLimitResource("S", 2, 1))),
        (["--model-control-mode=EXPLICIT"], "model_control_mode", "explicit"),
        (["--rate-limit=Execution_Count"], "rate_limit", "execution_count"),
        (["--log-format=ISO8601"], "log_format", "ISO8601"),
        (["--trace-config=mode=OpenTelemetry"], "trace_config", TraceOptions("opentelemetry")),
        (["--model-load-gpu-limit=0:0.5"], "model_load_gpu_limit", {0: 0.5}),
    ],
)  # fmt: skip
def test_values(words: list[str], field: str, value: Any) -> None:
    """The text of a flag becomes the value of its field."""
    assert getattr(parsed(*words), field) == value


def test_trace_flags_make_one_value() -> None:
    """Both modes, repeated levels, and the deprecated forms."""
    trace = parsed(
        "--trace-config=mode=opentelemetry",
        "--trace-config=level=TIMESTAMPS",
        "--trace-config=level=TENSORS",
        "--trace-config=rate=2",
        "--trace-config=triton,file=/t.json",
        "--trace-config=opentelemetry,resource=a=b",
        "--trace-config=opentelemetry,url=http://x",
        "--trace-count=5",
    ).trace_config
    assert (trace.mode, trace.level, trace.rate, trace.count) == (
        "opentelemetry", ("TIMESTAMPS", "TENSORS"), 2, 5,
    )  # fmt: skip
    assert trace.file == "/t.json"
    assert trace.opentelemetry == (("resource", "a=b"), ("url", "http://x"))


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("--http-port=x", "Invalid option value. Got x"),
        ("--http-port=99999999999", "Provided option value is out of bound. Got 99999999999"),
        ("--allow-http=maybe", "invalid value for bool option: maybe"),
        ("--model-control-mode=x",
         "invalid argument for --model-control-mode. Got x, not none or poll or explicit"),
        ("--log-format=x", "invalid argument for --log-format. Got x, not default or ISO8601"),
        ("--rate-limit=x", "invalid argument for --rate-limit. Got x, not off or execution_count"),
        ("--backend-config=x",
         "--backend-config option format is '<backend name>,<setting>=<value>'. Got x"),
        ("--cache-config=size=3",
         "--cache-config option format is '<cache name>,<setting>=<value>'. Got size=3"),
        ("--metrics-config=x", "--metrics-config option format is <setting>=<value>. Got x"),
        ("--rate-limit-resource=R",
         "--rate-limit-resource option format is '<resource_name>:<count>:<device>' or "
         "'<resource_name>:<count>'. Got R"),
        ("--http-restricted-api=foo:a=b", "unknown restricted api 'foo' "),
        ("--grpc-restricted-protocol=foo:a=b", "unknown restricted protocol 'foo' "),
        ("--http-restricted-api=health",
         "--http-restricted-api option format is '<config name>:<setting>=<value>'. Got health"),
        ("--trace-config=mode=x",
         'invalid value for trace mode option: x. Available options are "triton" and '
         '"opentelemetry"'),
        ("--trace-config=level=x", "invalid value for trace level option: x"),
        ("--trace-config=levels=x",
         "unknown trace setting 'levels'; known here: count, level, mode, rate"),
    ],
)  # fmt: skip
def test_a_bad_value_is_answered_in_triton_s_words(word: str, text: str) -> None:
    """The flag on one line, the reason on the next."""
    flag = word.partition("=")[0]
    assert refused(word).after == f'Bad option: "{flag}".\n{text}\n'


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--foo=1"], "npuserve: unrecognized option '--foo=1'"),
        (["--http-port"], "npuserve: option '--http-port' requires an argument"),
        (["--disable-auto-complete-config=1"],
         "npuserve: option '--disable-auto-complete-config' doesn't allow an argument"),
        (["--log=1"], "npuserve: option '--log=1' is ambiguous; possibilities: '--log-verbose' "
         "'--log-info' '--log-warning' '--log-error' '--log-format' '--log-file'"),
    ],
)  # fmt: skip
def test_a_word_that_is_no_flag_is_told_before_the_usage(words: list[str], text: str) -> None:
    """Where getopt_long complains."""
    assert refused(*words).before == text


def test_an_unknown_flag_suggests_the_nearest() -> None:
    """A slip of two letters is not looked up in the manual."""
    assert refused("--http-prot=1").after == "Did you mean --http-port?"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["abc"], "Unexpected argument: abc"),
        (["--model-config-name="], "Error: empty argument for --model-config-name"),
        (["--load-model=a"], "Error: Use of '--load-model' requires setting "
         "'--model-control-mode=explicit' as well.\n"),
        (["--http-port=8001"], "The server cannot listen to HTTP requests and GRPC requests at "
         "the same address and port 0.0.0.0:8001\n"),
        (["--sagemaker-safe-port-range=1-9"], "The server cannot listen to HTTP requests at port "
         "8000, allowed port range is [1, 9]\n"),
        (["--http-max-input-size=0"], "Error: --http-max-input-size must be greater than 0.\n"),
        (["--cache-config=local,size=1", "--response-cache-byte-size=1"],
         "Error: Incompatible flags --response-cache-byte-size and --cache-config both provided. "
         "Please provide one or the other."),
        (["--http-restricted-api=health:a=b", "--http-restricted-api=health:c=d"],
         'Bad option: "--http-restricted-api".\nrestricted api \'health\' can not be specified in '
         "multiple config groups\n"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_told_after_the_usage(words: list[str], text: str) -> None:
    """With the text of the real server."""
    assert refused(*words).after == text


def test_ports_of_services_that_are_off_or_free_do_not_collide() -> None:
    """Port 0 is another one each time."""
    parsed("--http-port=8001", "--allow-grpc=false")
    parsed("--http-port=0", "--grpc-port=0", "--metrics-port=0")


def test_a_flag_without_meaning_here_is_accepted_with_one_warning() -> None:
    """Launch scripts for the real server keep working."""
    options, warnings = cli.parse(
        ["--http-thread-count=4", "--http-thread-count=5", "--trace-rate=3"], {}
    )
    assert options.http_thread_count == 5
    assert [warning.split(":")[0] for warning in warnings] == [
        "--trace-rate is deprecated, use --trace-config",
        "--http-thread-count has no effect",
    ]


def test_vertex_ai_turns_the_other_front_ends_off_unless_asked_for() -> None:
    """AIP_* variables are defaults; flags go over them."""
    environ = {"AIP_MODE": "PREDICTION", "AIP_HTTP_PORT": "9", "AIP_STORAGE_URI": "gs://b/m"}
    options = parsed("--allow-grpc=true", **environ)
    assert (options.allow_vertex_ai, options.allow_http, options.allow_grpc) == (True, False, True)
    assert (options.vertex_ai_port, options.model_repository) == (9, ("gs://b/m",))
    assert parsed(REPOSITORY, **environ).model_repository == ("/repo",)


def test_serve_is_the_command_of_a_sagemaker_container() -> None:
    """The variables of one model, and those of the multi-model mode."""
    single = parsed(
        "serve",
        SAGEMAKER_TRITON_DEFAULT_MODEL_NAME="m",
        SAGEMAKER_BIND_TO_PORT="8888",
        SAGEMAKER_TRITON_ALLOW_METRICS="true",
        SAGEMAKER_TRITON_SHM_DEFAULT_BYTE_SIZE="9",
    )
    assert (single.allow_http, single.allow_grpc, single.allow_metrics) == (False, False, True)
    assert (single.allow_sagemaker, single.sagemaker_port) == (True, 8888)
    assert (single.model_repository, single.load_model) == (("/opt/ml/model/",), ("m",))
    assert single.backend_options("python") == {"shm-default-byte-size": "9"}
    multi = parsed("serve", SAGEMAKER_MULTI_MODEL="true")
    assert (multi.model_control_mode, multi.model_namespacing) == ("explicit", True)


def test_usage_names_every_setting_once() -> None:
    """The text is derived, so nothing can be forgotten."""
    lines = cli.usage().splitlines()
    for section in SECTIONS:
        for field in section.model_fields:
            flag = f"  --{field.replace('_', '-')}"
            assert sum(re.split(r" [<\[]", line)[0] == flag for line in lines) == 1, flag


def test_every_setting_belongs_to_one_section() -> None:
    """ServerOptions is the sections and nothing else."""
    fields = [field for section in SECTIONS for field in section.model_fields]
    assert sorted(fields) == sorted(ServerOptions.model_fields)


def test_help_ends_well_and_mistakes_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit codes and where the text goes."""
    assert cli.main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("Usage: npuserve [options]\n")
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"npuserve {npuserve.__version__}\n"
    assert cli.main(["abc"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Usage: npuserve [options]\n")
    assert err.endswith("Unexpected argument: abc\n")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "--model-repository must be specified"),
        ([REPOSITORY, "--model-control-mode=explicit", "--load-model=*", "--load-model=a"],
         "Wildcard model name '*' must be the ONLY startup model if specified at all."),
    ],
)  # fmt: skip
def test_a_server_that_cannot_be_created_ends_with_code_1(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the usage text: the flags were fine."""
    assert cli.main(words) == 1
    assert capsys.readouterr().err == f"error: creating server: Invalid argument - {text}\n"


def test_a_refused_start_names_code_and_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NpuserveError of the application becomes Triton's line."""

    def fail(options: ServerOptions) -> int:
        raise NotFoundError(f"nothing at {options.model_repository[0]}")

    monkeypatch.setattr("npuserve.app.main", fail)
    assert cli.main([REPOSITORY]) == 1
    assert capsys.readouterr().err == "error: creating server: Not found - nothing at /repo\n"


def test_the_package_runs_as_a_module() -> None:
    """`python -m npuserve` is the same command."""
    done = subprocess.run([sys.executable, "-m", "npuserve", "--help"], capture_output=True)
    assert done.returncode == 0
    assert b"--model-repository <string>" in done.stdout


@given(st.lists(st.text(st.sampled_from("-=,: abhttpo.1")), max_size=4))
def test_any_words_are_options_or_a_usage_error(words: list[str]) -> None:
    """Random command lines never raise anything else."""
    with contextlib.suppress(cli.UsageError):
        cli.parse(words, {})


@given(
    st.sampled_from([field for section in SECTIONS for field in section.model_fields]),
    st.text(st.sampled_from("tru e01-:=,9ab*"), max_size=6),
)
def test_any_value_of_any_flag_is_taken_or_refused(field: str, text: str) -> None:
    """No flag lets a Python error through."""
    with contextlib.suppress(cli.UsageError):
        cli.parse([f"--{field.replace('_', '-')}={text}"], {})
