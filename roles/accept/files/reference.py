"""The model's own greedy answer, by transformers on the CPU in float32. Request and answer are JSON."""

import json
import os
import sys

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

request = json.load(sys.stdin)
torch.set_num_threads(min(8, os.cpu_count() or 1))
tokenizer = AutoTokenizer.from_pretrained(request["model"])
model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32).eval()
inputs = tokenizer(request["prompt"], return_tensors="pt")
with torch.inference_mode():
    output = model.generate(**inputs, max_new_tokens=request["tokens"], do_sample=False, num_beams=1)
new = output[0, inputs["input_ids"].shape[1] :]
print(json.dumps({"text": tokenizer.decode(new, skip_special_tokens=True), "tokens": len(new)}))
