"""Mistakes in how a model.py uses the Python backend's objects, and in what it reads when it loads."""

from __future__ import annotations

from tests.support.page_plants import page
from tests.support.planted import MODEL, Edit, Plant, change, changes

CODE, FIRST = "first/1/model.py", "first/config.pbtxt"
IMPORTS = "import json\nfrom pathlib import Path\n\n"
START = "    def execute(self, requests):\n"
READ = 'pb_utils.get_input_tensor_by_name(request, "X").as_numpy()'
ANSWER = 'pb_utils.InferenceResponse([pb_utils.Tensor("Y", x * np.float32(2))])'
SENDING = "import threading\n" + MODEL.replace(
    f"            responses.append({ANSWER})\n        return responses\n",
    f"""            sender = request.get_response_sender()
            sender.send({ANSWER}, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
""",
)
ASKED = """asked = pb_utils.InferenceRequest(
                model_name="left", model_version=1, requested_output_names=["Y"], inputs=[pb_utils.Tensor("X", x)]
            )"""
ASKING: dict[str, Edit] = {
    CODE: MODEL.replace("            responses.append", f"            {ASKED}\n            responses.append")
}
SIZE = 'self.size = int(json.loads(args["model_config"])["parameters"]["size"]["string_value"])'
GIVEN = 'parameters { key: "size" value { string_value: "8" } }\n'
ONE_CALL = 'asked = pb_utils.InferenceRequest(model_name="left", requested_output_names=["Y"], inputs=[])'

TYPED = 'inputs=[pb_utils.Tensor("X", np.zeros((1, 4), np.float32))]'
TYPED_CALL = ONE_CALL.replace("inputs=[]", TYPED)


def initialize(*lines: str, settings: str = "") -> dict[str, Edit]:
    """Edits that give the model of the base an ``initialize``."""
    method = "    def initialize(self, args):\n" + "".join(f"        {line}\n" for line in lines)
    more: dict[str, Edit] = {FIRST: ("instance_group", f"{settings}instance_group")} if settings else {}
    return {CODE: IMPORTS + MODEL.replace(START, f"{method}\n{START}"), **more}


CONFIG = (
    'model_config = json.loads(args["model_config"])',
    'self.size = int(model_config["parameters"]["size"]["string_value"])',
)
KEPT = (
    'self.config = json.loads(args["model_config"])',
    'self.kind = pb_utils.get_output_config_by_name(self.config, "Y")["data_type"]',
)
LABELS = 'labels = open(Path(__file__).with_name("labels.txt"), encoding="utf-8").read()'
IS_THERE: dict[str, Edit] = {**initialize(LABELS), "first/1/labels.txt": "a\n"}

PLANTS = (
    page("wrong-arguments", CODE),
    page("unknown-attribute", CODE),
    page(
        "called-tensor-unknown",
        CODE,
        {CODE: MODEL.replace("            responses.a", f"            {ONE_CALL}\n            responses.a")},
    ),
    page(
        "wrong-args-key",
        CODE,
        initialize('self.name = args["model_name"]'),
        core="KeyError: 'modelname'",
        model="first",
    ),
    page("parameter-missing", at=CODE, line="self.size", good=initialize(SIZE), core="KeyError: 'size'", model="first"),
    page("file-opened-relative", CODE, IS_THERE, core="No such file or directory: 'labels.txt'", model="first"),
    page("file-not-there", CODE, IS_THERE, core="No such file or directory: '.*label.txt'", model="first"),
    page(
        "text-beyond-ascii",
        CODE,
        {**IS_THERE, "first/1/labels.txt": "é\n"},
        core="'ascii' codec can't decode",
        model="first",
    ),
    page(
        "wrong-call",
        CODE,
        {CODE: MODEL.replace("            responses.a", f"            {TYPED_CALL}\n            responses.a")},
    ),
    page(
        "numpy-name-removed",
        CODE,
        initialize("self.kind = float"),
        core="no attribute 'float'",
        model="first",
        target="embedded",
    ),
    *changes(
        CODE,
        ("wrong-arguments", "a tensor's arguments exchanged", '"Y", x * np.float32(2)', 'x * np.float32(2), "Y"'),
        ("wrong-arguments", "a tensor's arguments by name", '"Y", x *', 'name="Y", array=x *'),
        ("wrong-arguments", "a tensor of a list", "x * np.float32(2)", "[[1.0, 2.0, 3.0, 4.0]]"),
        ("wrong-arguments", "a tensor that is not an array", "x * np.float32(2)", READ.removesuffix(".as_numpy()")),
        ("wrong-arguments", "an error that is a text", ANSWER, 'pb_utils.InferenceResponse(error="no")'),
        ("wrong-arguments", "an answer of a tensor", ANSWER, 'pb_utils.InferenceResponse(pb_utils.Tensor("Y", x))'),
        ("wrong-arguments", "texts without a dtype", "x * np.float32(2)", "np.array([str(v) for v in x])"),
        (
            "unknown-attribute",
            "a tensor as an array",
            READ + "\n",
            READ.removesuffix(".as_numpy()") + "\n            y = x + 1\n",
            "",
            "x + 1",
        ),
        (
            "unknown-attribute",
            "a method that is not called",
            "            responses.a",
            "            if request.is_cancelled:\n                break\n            responses.a",
            "",
            "is_cancelled",
        ),
        (
            "unknown-attribute",
            "a logger of Python's",
            "            responses.a",
            '            pb_utils.Logger.info("a")\n            responses.a',
            "",
            "info",
        ),
        (
            "unknown-attribute",
            "parameters that are not parsed",
            "            responses.a",
            '            y = request.parameters()["a"]\n            responses.a',
            "",
            "parameters",
        ),
        (
            "unknown-attribute",
            "parameters that are not asked for",
            "            responses.a",
            "            y = json.loads(request.parameters)\n            responses.a",
            "",
            "parameters",
        ),
        (
            "unknown-attribute",
            "a method in place of an array",
            READ,
            READ[:-2] + "\n            x.max()",
            "",
            "as_numpy",
        ),
        (
            "wrong-arguments",
            "a logger with arguments",
            "            responses.a",
            '            pb_utils.Logger.log_info("%s", 1)\n            responses.a',
            "",
            "log_info",
        ),
        ("unknown-attribute", "a request asked for a tensor", READ, 'request.get_input("X")'),
        (
            "unknown-attribute",
            "an answer read as a tensor",
            f"responses.append({ANSWER})",
            "pb_utils.InferenceResponse([]).as_numpy()",
        ),
    ),
    *changes(
        CODE,
        (
            "wrong-answers",
            "an answer for each row",
            "            sender.send",
            "            for _ in x:\n                sender.send",
            "",
            "sender.send(",
        ),
        (
            "wrong-answers",
            "answers of a thread",
            SENDING[SENDING.index("            sender.send") :],
            """            threading.Thread(target=self.tell, args=(sender, x)).start()

    def tell(self, sender, x):
        for row in x:
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", row)]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
""",
            "",
            "            sender.send(pb",
        ),
        ("wrong-answers", "no end", ", flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL", "", "", "sender.send("),
        ("wrong-arguments", "a tensor as an answer", f"send({ANSWER}", 'send(pb_utils.Tensor("Y", x)'),
        ("wrong-arguments", "a list of answers", f"send({ANSWER}", f"send([{ANSWER}]"),
        ("unknown-attribute", "a request as a sender", f"sender.send({ANSWER}", f"request.send({ANSWER}"),
        ("unknown-attribute", "a flag that is not there", "COMPLETE_FINAL", "COMPLETE_LAST"),
        good={CODE: SENDING},
    ),
    *changes(
        CODE,
        ("wrong-arguments", "a version that is a text", "version=1", 'version="1"', "", "asked ="),
        ("wrong-arguments", "no outputs asked for", 'requested_output_names=["Y"], ', "", "", "asked ="),
        ("wrong-arguments", "one output asked for by its name", '=["Y"]', '="Y"', "", "asked ="),
        (
            "wrong-call",
            "a call that is not awaited",
            "            responses.a",
            "            asked.async_exec()\n            responses.a",
        ),
        (
            "wrong-call",
            "a call that is read and not awaited",
            "            responses.a",
            "            got = asked.async_exec()\n            got.has_error()\n            responses.a",
            "",
            "async_exec",
        ),
        (
            "wrong-call",
            "a misspelt model of a table",
            'model_name="left"',
            'model_name={"a": "left", "b": "lefft"}[request.request_id()]',
            "",
            "asked =",
        ),
        ("wrong-call", "a misspelt model", 'model_name="left"', 'model_name="lefft"', "", "asked ="),
        ("wrong-call", "a version that is not there", "model_version=1", "model_version=7", "", "asked ="),
        ("called-tensor-unknown", "an input of another model", '"X", x)]', '"A", x)]', "", "asked ="),
        good=ASKING,
    ),
    change(
        CODE,
        "wrong-args-key",
        "a configuration that is not parsed",
        SIZE,
        'self.size = args["model_config"]["max_batch_size"]',
        "string indices must be integers",
        good=initialize(SIZE, settings=GIVEN),
        model="first",
    ),
    change(
        CODE,
        "wrong-args-key",
        "a tensor's configuration of a text",
        '(self.config, "Y")',
        '(args["model_config"], "Y")',
        "string indices must be integers",
        "self.kind",
        good=initialize(*KEPT),
        model="first",
    ),
    change(
        FIRST,
        "parameter-missing",
        "a parameter that is no number",
        '"8"',
        '"eight"',
        "invalid literal for int",
        good=initialize(*CONFIG, settings=GIVEN),
        model="first",
    ),
    Plant(
        "a file that is nowhere",
        "file-opened-relative",
        CODE,
        "open(",
        {CODE: ('Path(__file__).with_name("labels.txt")', '"labels.txt"'), "first/1/labels.txt": None},
        IS_THERE,
        "No such file",
        "first",
        "embedded",
    ),
    *(
        change(
            CODE,
            "model-py-syntax",
            f"syntax for a newer Python than {target}'s",
            "    def execute",
            f"{code}    def execute",
            core,
            line,
            model="first",
            target=target,
        )
        for target, code, core, line in (
            ("24.10", "    try:\n        A = 1\n    except* ValueError:\n        A = 2\n\n", "", "try:"),
            ("23.04", "    match 1:\n        case _:\n            A = 1\n\n", "", "match 1"),
            ("embedded", "    A = f'{'a'}'\n\n", "SyntaxError", "A = "),
        )
    ),
)
