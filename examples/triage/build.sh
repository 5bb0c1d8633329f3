#!/usr/bin/env bash
# From messages.csv to answers. All that it makes is in build/, which it makes anew.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
rm -rf build
mkdir build

# Two models, trained by libraries that know nothing of Triton; the trees see counts of shoal's own component.
python train.py words messages.csv build
shoal new component words --like word_counts --artifact words.txt=build/words.txt --project build
python train.py models messages.csv build

# Each becomes a Triton model, its configuration derived from its file.
shoal add-model build/encoder topic --task classify --tokenizer tokens --project build
shoal add-model build/counts.txt trees --label billing --label technical --label other --project build

# Behind them: seven parts encoder and three parts trees, then the best label.
shoal new component vote --like blend --set 'weights=[7, 3]' --project build
shoal new component verdict --like label --set 'labels=["billing", "technical", "other"]' --project build

# One request from message to topic.
python pipeline.py build
shoal check build
shoal compose triage build/repository --project build
python train.py score messages.csv build/repository/triage
shoal infer --local --repository build/repository "You charged me twice!" "no wifi since noon" "Are you open on Sunday?"
