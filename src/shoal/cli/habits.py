"""Words of other tools, and examples: what to type instead of a command line that is refused."""

from __future__ import annotations

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
# The same of options, by command; an option with a value is of those that have none here.
_URL = dict.fromkeys(("--grpc-port", "--http-port", "--port", "--host"), "--url HOST:PORT, of gRPC")
ON_GPU = dict.fromkeys(("--gpu", "--device"), "shoal compose ENSEMBLE REPOSITORY --placement gpu, and serve that")
_TLS = dict.fromkeys(
    ("--ssl-certfile", "--ssl-keyfile", "--ssl-cert", "--ssl-key"), "--tls-cert FILE --tls-key FILE, both of them"
)
_PRINT = "--print, without a value: it prints the command for docker"
_UNIT = f"{_PRINT}. A unit of systemd is in docs/serving.md, under systemd"
_PROBES = f"{_PRINT}. Probes of Kubernetes are in docs/serving.md, under Containers"
_PROXY = f"{_PRINT}. Settings of nginx and Caddy are in docs/keys.md, under Behind nginx or Caddy"
_FORMS = {
    **dict.fromkeys(("--print docker", "--print compose"), _PRINT),
    **dict.fromkeys(("--print systemd", "--systemd"), _UNIT),
    **dict.fromkeys(("--print k8s", "--print kubernetes", "--k8s", "--kubernetes"), _PROBES),
    **dict.fromkeys(("--print nginx", "--print caddy", "--nginx", "--caddy"), _PROXY),
}
_STEPS = "shoal new pipeline NAME --step MODEL --step softmax --project FOLDER, and what it prints next"
_LABELS = """shoal new component topic --like label --set labels='["a", "b"]' --project FOLDER; then """
OPTIONS = {
    "add-model": {"--repository": "--project FOLDER, of your project; then shoal compose NAME REPOSITORY"},
    "chat": {"--url": "shoal chat HOST:PORT"},
    "infer": {"--explain": "--full, which prints all numbers of the answer", **_URL},
    "status": {"--url": "shoal status HOST:PORT, of the metrics port"},
    "generate": {"--chat": "shoal chat", "--system": "shoal chat --system TEXT", **_URL},
    "tokens": _URL,
    "serve": {
        **ON_GPU,
        **_TLS,
        **_FORMS,
        "--workers": "shoal compose ENSEMBLE REPOSITORY --instances MODEL=COUNT, and serve that",
        "--instances": "shoal compose ENSEMBLE REPOSITORY --instances MODEL=COUNT, and serve that",
        "--batch-delay": "shoal compose ENSEMBLE REPOSITORY --queue-delay MODEL=MICROSECONDS, and serve that",
        "--queue-delay": "shoal compose ENSEMBLE REPOSITORY --queue-delay MODEL=MICROSECONDS, and serve that",
        "--max-batch-size": "max_batch_size: ROWS in the config.pbtxt of the model, compose again, and serve that",
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
