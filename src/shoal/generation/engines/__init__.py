"""Engines: language models that continue token requests. Some of these modules import torch and transformers."""
