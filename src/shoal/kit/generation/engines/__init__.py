"""Engines: language models that continue token ids. Some of these modules import torch and transformers."""
