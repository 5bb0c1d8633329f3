"""How the models of the triage pipeline are joined: python pipeline.py build

It writes build/ensembles/triage/config.pbtxt, after comparing each tensor's dtype and shape with those of the models in
build/.

    MESSAGE -> checked_text -+-> tokens -> topic -+-> vote -> verdict -> TOPIC, CONFIDENCE
                             +-> words  -> trees -+

A message that cannot be read is refused by the first step, before the two that read it side by side.
"""

import sys
from pathlib import Path

import shoal

project = Path(sys.argv[1])
triage = shoal.Ensemble("triage", projects=[project])

message = triage.step("checked_text", TEXT=triage.input("MESSAGE", "STRING", [1]))["CHECKED"]
tokens = triage.step("tokens", TEXT=message)
topic = triage.step("topic", INPUT__0=tokens["input_ids"], INPUT__1=tokens["attention_mask"])
words = triage.step("words", TEXT=message)
trees = triage.step("trees", input__0=words["COUNTS"])
vote = triage.step("vote", FIRST=topic["OUTPUT__0"], SECOND=trees["output__0"])
verdict = triage.step("verdict", SCORES=vote["BLEND"])
triage.output("TOPIC", verdict["LABEL"])
triage.output("CONFIDENCE", verdict["SCORE"])

triage.write(project / "ensembles" / "triage")
