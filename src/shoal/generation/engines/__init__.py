"""Engines: language models that continue token requests. Their modules import torch and transformers."""
