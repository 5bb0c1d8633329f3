"""NVIDIA's model for TensorRT-LLM's LLM API, from the image; it reads the model.yaml beside this file."""

import sys
from importlib.util import module_from_spec, spec_from_file_location

FOLDER = "/app/all_models/llmapi/tensorrt_llm/1"

sys.path.insert(0, FOLDER)
spec = spec_from_file_location("trtllm_llmapi", f"{FOLDER}/model.py")
module = module_from_spec(spec)
spec.loader.exec_module(module)
TritonPythonModel = module.TritonPythonModel
