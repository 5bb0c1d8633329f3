"""Words of other tools, and examples: what to type instead of a command line that is refused."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

from typer.core import TyperCommand

_TYPE = "Type: "  # before what is typed instead
# Commands of other tools, and what to type here, by meaning: spelling leads elsewhere, or nowhere.
_WITHOUT = "shoal compose OTHER_ENSEMBLES REPOSITORY, which leaves the model out, and start shoal serve again"
_UPGRADE = "pip install --upgrade shoal; in a clone: git pull, then install it again as before, such as: pip install ."
HABITS = {
    "add": "shoal add-model FILE NAME, or at once: shoal serve FILE",
    "benchmark": "shoal bench REPOSITORY",
    "compare": "shoal bench REPOSITORY OTHER_REPOSITORY",
    "convert": "shoal add-model FILE NAME",
    "delete": _WITHOUT,
    "deploy": "shoal serve REPOSITORY",
    "docker": "shoal serve REPOSITORY --print, which prints the command for docker",
    "draw": "shoal graph REPOSITORY",
    "embed": "shoal infer --model NAME TEXT",
    "explain": "shoal describe REPOSITORY, for a pipeline; shoal check --explain RULE, for a rule",
    "export": "shoal add-model FILE NAME",
    "help": "shoal --help, or shoal COMMAND --help",
    "import": "shoal add-model FILE NAME",
    "init": "shoal new pipeline NAME",
    "list": "shoal status, of what is served",
    "load": "shoal serve MODEL",
    "logs": "shoal serve REPOSITORY --log FILE",
    "ls": "shoal status, of what is served",
    "models": "shoal status, of what is served",
    "plot": "shoal graph REPOSITORY",
    "predict": "shoal infer --model NAME VALUE",
    "ps": "shoal status",
    "remove": _WITHOUT,
    "rm": _WITHOUT,
    "run": "shoal serve MODEL; then shoal infer, or shoal chat for a language model",
    "start": "shoal serve REPOSITORY",
    "stop": "Ctrl-C in the terminal of shoal serve, or send its process SIGTERM",
    "test": "shoal check PROJECT, and pytest, which runs the tests that shoal new wrote",
    "unload": _WITHOUT,
    "up": "shoal serve REPOSITORY",
    **dict.fromkeys(("update", "upgrade"), _UPGRADE),
    "validate": "shoal check REPOSITORY",
    "version": "shoal --version",
}
# The same of the commands of groups.
NESTED = {
    "new": dict.fromkeys(("preprocess", "postprocess", "preprocessing", "postprocessing"), "shoal new component NAME"),
    "keys": {
        **dict.fromkeys(("add", "create", "generate", "make"), "shoal keys new NAME"),
        **dict.fromkeys(("delete", "remove", "rm"), "shoal keys revoke NAME"),
        **dict.fromkeys(("ls", "show"), "shoal keys list"),
    },
}
# The same of options, by command; an option with a value is of those that have none here. A sentence, which begins with
# a capital letter, is shown as it is; before anything else: "Type: ".
_URL = dict.fromkeys(("--grpc-port", "--http-port", "--port", "--host"), "--url HOST:PORT, of gRPC")
ON_GPU = dict.fromkeys(
    ("--gpu", "--gpus", "--device"), "shoal compose ENSEMBLE REPOSITORY --placement gpu, and serve that"
)
_TLS = dict.fromkeys(
    ("--ssl-certfile", "--ssl-keyfile", "--ssl-cert", "--ssl-key"), "--tls-cert FILE --tls-key FILE, both of them"
)
_PRINT = "--print, which prints a docker run, or --print dockerfile"
_UNIT = f"{_PRINT}. A unit of systemd is in docs/serving.md, under systemd"
_PROBES = f"{_PRINT}. Probes of Kubernetes are in docs/serving.md, under Containers"
_PROXY = f"{_PRINT}. Settings of nginx and Caddy are in docs/keys.md, under Behind nginx or Caddy"
_FORMS = {
    **dict.fromkeys(("--print compose", "--dockerfile"), _PRINT),
    **dict.fromkeys(("--print systemd", "--systemd"), _UNIT),
    **dict.fromkeys(("--print k8s", "--print kubernetes", "--k8s", "--kubernetes"), _PROBES),
    **dict.fromkeys(("--print nginx", "--print caddy", "--nginx", "--caddy"), _PROXY),
}
_TABLES = dict.fromkeys(
    ("--delimiter", "--sep", "--separator"), "Leave it out: commas, semicolons and tabs are found in the header"
)
_FOREGROUND = (
    "Leave it out: it runs in the foreground. Type & after the command. A unit of systemd is in docs/serving.md, under"
    " systemd; the command of a container is printed by --print"
)
_AGAIN = "Leave it out: end it with Ctrl-C and type the command again, which serves what the folder holds then"


_COMPOSE_LLM = "shoal compose llm_bls REPOSITORY --weights FOLDER --together"


def _of_engine(setting: str) -> str:
    made = f"shoal new component my-llm --like llm-hf --set {setting}"
    return f"{made}; then {_COMPOSE_LLM} --swap llm-hf=my-llm --project ., and serve that"


def _of_vllm(argument: str) -> str:
    made = f"shoal new component my-llm --like llm-vllm --set 'engine_args={{{argument}}}'"
    swapped = f"{_COMPOSE_LLM} --swap llm-hf=my-llm --project . --placement gpu"
    return f"{made}; then {swapped}, and serve that, as in docs/language-models.md, under Other engines"


_FOR_ENGINES = {
    **dict.fromkeys(("--tp", "--tensor-parallel-size"), _of_vllm('"tensor_parallel_size": 2')),
    **dict.fromkeys(("--max-model-len", "--max-seq-len", "--context-length", "--ctx-size"), _of_engine("context=4096")),
    "--max-num-seqs": _of_engine("slots=16"),
    "--gpu-memory-utilization": _of_vllm('"gpu_memory_utilization": 0.8'),
    "--dtype": "shoal compose ENSEMBLE REPOSITORY --dtype bf16, or fp32, fp16, int8, and serve that",
    **dict.fromkeys(("--quantization", "--quantize"), f"{_COMPOSE_LLM} --quantize int8, and serve that"),
    **dict.fromkeys(
        ("--backend", "--engine"),
        "Leave it out: the model's file says it. Another engine of a language model:"
        f" {_COMPOSE_LLM} --engine vllm, or openvino, and serve that",
    ),
    "--trust-remote-code": "Leave it out: code in a model's folder is not run",
}
_STEPS = "shoal new pipeline NAME --step MODEL --step softmax --project FOLDER, and what it prints next"
_LABELS = """shoal new component topic --like label --set labels='["a", "b"]' --project FOLDER; then """
OPTIONS = {
    "add-model": {"--repository": "--project FOLDER, of your project; then shoal compose NAME REPOSITORY"},
    "bench": {
        **dict.fromkeys(("--duration", "--time"), "--seconds SECONDS"),
        **dict.fromkeys(("--callers", "--streams", "--clients", "--users", "--threads"), "--concurrency 1,4"),
        "--batch-size": "--batches 1,8",
        **dict.fromkeys(("--iterations", "--runs"), "--repeats COUNT"),
        **_TABLES,
    },
    "chat": {"--url": "shoal chat HOST:PORT"},
    "infer": {"--explain": "--full, which prints all numbers of the answer", **_URL, **_TABLES},
    "status": {"--url": "shoal status HOST:PORT, of the metrics port"},
    "generate": {"--chat": "shoal chat", "--system": "shoal chat --system TEXT", **_URL},
    "tokens": _URL,
    "serve": {
        **ON_GPU,
        **_TLS,
        **_FORMS,
        **_FOR_ENGINES,
        **dict.fromkeys(("--detach", "-d", "--daemon", "--background"), _FOREGROUND),
        **dict.fromkeys(("--reload", "--watch"), _AGAIN),
        "--workers": "shoal compose ENSEMBLE REPOSITORY --instances MODEL=COUNT, and serve that",
        "--instances": "shoal compose ENSEMBLE REPOSITORY --instances MODEL=COUNT, and serve that",
        "--batch-delay": "shoal compose ENSEMBLE REPOSITORY --queue-delay MODEL=MICROSECONDS, and serve that",
        "--queue-delay": "shoal compose ENSEMBLE REPOSITORY --queue-delay MODEL=MICROSECONDS, and serve that",
        "--max-batch-size": "max_batch_size: ROWS in the config.pbtxt of the model, which is in build/NAME/models if"
        " shoal serve made it; compose again, and serve that",
        "--llm": "shoal serve FOLDER_WITH_WEIGHTS",
        "--model": "shoal serve MODEL, without --model",
        "--served-model-name": "--name NAME",
        **dict.fromkeys(("--softmax", "--postprocess"), _STEPS),
        "--labels": f"{_LABELS}{_STEPS.replace('softmax', 'topic')}",
        "--docker": "--print, which prints the command of the container",
        "--port": "--http-port PORT, of Triton's HTTP and OpenAI's API",
        "--api-key": "shoal keys new NAME --file keys.json, then: --keys keys.json",
    },
}
# Arguments of an example, by command.
EXAMPLES = {
    "add-model": "model.onnx scorer",
    "compose": "scoring build/repository",
    "copies": "build/repository/scoring",
    "describe": "build/repository",
    "env fit": "build/env",
    "env inspect": "build/env",
    "env unpack": "build/env build/unpacked",
    "fill": "config.pbtxt max_batch_size:8",
    "graph": "build/repository --out ensemble.svg",
    "keys new": "team-a",
    "keys revoke": "team-a",
    "keys rotate": "team-a",
    "new component": "cleaner",
    "new model": "scorer --features 4",
    "new pipeline": "scoring --step cleaner --step scorer",
    "plan": "scoring",
    "serve": "build/repository",
    "shards merge": "build/out --output build/merged.jsonl",
    "shards status": "build/out",
    "shards verify": "build/out",
    "tokens": "1,2,3",
}


def _refuse_habits(command: TyperCommand, ctx: Any, args: list[str]) -> None:
    """Refuse an option of other tools with what to type instead."""
    habits = OPTIONS.get(str(command.name), {})
    words = " ".join(args).replace("=", " ").split()
    given = {*words, *map(" ".join, pairwise(words))}
    if habit := next((each for each in habits if each in given), None):
        said = _say_option(habit, habits)
        if command.name == "serve" and said.startswith(_TYPE):
            from shoal.cli.advice import fill

            said = _TYPE + fill(said.removeprefix(_TYPE), words)
        ctx.fail(f"No such option: {habit}. {said}")


def advise(command: TyperCommand, ctx: Any, args: list[str], error: Any) -> None:
    """Refuse an option of other tools with what to type instead; give other errors what is near, or an example."""
    _refuse_habits(command, ctx, args)
    if hasattr(error, "possibilities"):  # there is no such option
        habits = OPTIONS.get(str(command.name), {})
        own = [option for each in command.params for option in (*each.opts, *each.secondary_opts) if option[:2] == "--"]
        near = _find_near(error.option_name, [*own, *habits])
        if near and near[0] in habits:
            ctx.fail(f"{error.message}. Did you mean {near[0]}? {_say_option(near[0], habits)}")
        error.possibilities = [each for each in near if each in own]
    elif hasattr(error, "param_type"):  # an argument is missing
        if error.param.nargs == -1:  # the one after it took its only value
            error.param = next(each for each in reversed(command.params) if each.param_type_name == "argument")
        examples = (f"shoal {name} {EXAMPLES[name]}" for name in EXAMPLES if ctx.command_path.endswith(f" {name}"))
        error.message = f"For example: {next(examples, f'shoal {command.name} --help')}"
    elif wrong := re.match(r"Value error, ('(.*)' is not one of .*)", str(error.message), re.DOTALL):
        from shoal.authoring.project.importing.tasks import advise_task

        error.message = f"{wrong[1]} {advise_task(wrong[2])}" if error.param.name == "task" else wrong[1]


def refuse_extra(command: TyperCommand, ctx: Any, args: list[str], extra: Sequence[str]) -> None:
    """Refuse ``extra`` arguments with what to type instead."""
    _refuse_habits(command, ctx, args)
    given = [str(ctx.params[each.name]) for each in command.params if each.param_type_name == "argument"]
    name = ctx.command_path.partition(" ")[2]
    ctx.fail(f"Too many arguments: {shlex.join(extra)}. {_say_extra(name, given, extra)}")


def _find_near(option: str, known: Sequence[str]) -> list[str]:
    """Return the known options that begin like ``option``, or are spelt nearly like it, the most similar one first."""
    names = {each.lstrip("-"): each for each in known if " " not in each}
    name = option.lstrip("-")
    longer = [each for each in names if len(name) > 2 and each.startswith(name)]
    return [names[each] for each in dict.fromkeys([*longer, *get_close_matches(name, names, 3, 0.75)])]


def _say_option(option: str, habits: Mapping[str, str]) -> str:
    """Return what to type instead of an option of other tools."""
    from shoal.system.machine import find_gpus

    if option in ON_GPU and not find_gpus():
        return "This machine has no GPU: leave it out, to serve on the CPU."
    return habits[option] if habits[option][0].isupper() else _TYPE + habits[option]


def _say_extra(command: str, given: Sequence[str], extra: Sequence[str]) -> str:
    """Return what to type instead of a command line with ``extra`` arguments after those that may be ``given``."""
    if command == "serve":
        return (
            "Serve one thing at a time. Several pipelines are served from one repository: shoal compose ENSEMBLE"
            " OTHER_ENSEMBLE REPOSITORY; or each at ports of its own: --http-port 0 --grpc-port 0 --metrics-port 0"
        )
    if command == "chat":
        place = f"--model {shlex.quote(given[0])}" if ":" not in given[0] else given[0]
        return f"A message is piped: echo {shlex.quote(' '.join(extra))} | shoal chat {place}"
    if command == "generate":
        if len(extra) == 1 and re.fullmatch(r"[\w.-]+:\d+", extra[0]):
            return f"Name the server by --url: shoal generate {shlex.quote(given[0])} --url {extra[0]}"
        return f"Quote the text: shoal generate {shlex.quote(' '.join([*given, *extra]))}"
    return f"For example: shoal {command} {EXAMPLES.get(command, '--help')}"
