"""Environments and agents that show images, over real processes and the demo's model with images: the engine's log-probs are
those of transformers over the whole conversation and those of the learner, and a response that was stopped continues as it was.
"""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import ROOT
from PIL import Image
from scripted import ScriptedPool, engine_ranks
from test_pool import answers, begin, ids_of
from transformers import AutoModelForImageTextToText
from transformers.models.auto.image_processing_auto import AutoImageProcessor

import train_async
from examples.demo.pictures import QUESTION, problems
from rl import parts
from rl.data.args import DataArgs
from rl.data.image_prompts import ImagePrep
from rl.data.prompts import Prompt, PromptDataset, PromptOrder
from rl.environments.pool import Environments
from rl.generation.embedded import TransformersEngine
from rl.generation.generator import Generator
from rl.generation.make import make_responses
from rl.images import to_rgb
from rl.learning.batch import Batch, MicroBatch
from rl.learning.batch_images import BatchImages
from rl.model.loading import load_weights
from rl.model.policy import Policy
from rl.model.pretrained import end_token_ids, load_config, load_tokenizer
from rl.samples.group import Group
from tests.programs.shows import following, picture

SHOWS = ROOT / "tests" / "programs" / "shows.py"
ROW = problems("train")[3]
NUMBER = int(ROW["reward_model"]["ground_truth"])
N = 3  # responses
# Shows the model's last words in another conversation, and then an image behind its own: two histories, with images in both.
AGENT = f"""
import base64, io, json, os, sys, urllib.request
sys.path[:0] = [{str(ROOT)!r}]
from tests.programs.shows import following, picture

def image(number):
    picture(number).save(file := io.BytesIO(), "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return [{{"type": "image_url", "image_url": {{"url": url}}}}, {{"type": "text", "text": "Number?"}}]

def ask(messages):
    body, key = json.dumps({{"model": "policy", "messages": messages}}).encode(), os.environ["OPENAI_API_KEY"]
    url, head = os.environ["OPENAI_BASE_URL"] + "/chat/completions", {{"Authorization": "Bearer " + key}}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, body, head)))["choices"][0]["message"]

number = int(json.load(sys.stdin)["ground_truth"])
messages = [{{"role": "user", "content": image(number)}}]
said = ask(messages)
ask([{{"role": "user", "content": [*image(number + 1), *image(number + 2)]}}])
text = ask([*messages, said, {{"role": "user", "content": image(following(number))}}])["content"]
print(json.dumps({{"reward": float(text == str(following(number)))}}))
"""


class World:
    """A generator over the demo's model, its row with an image or none, and an environment of shows.py or an agent."""

    def __init__(self, path: str, prompts, **flags):
        self.args = parts.make(train_async.Args, model=path, rollout_n=N, max_response_length=120, max_num_seqs=N, **flags)
        config, tokenizer = load_config(path), load_tokenizer(path)
        self.prep = ImagePrep(path, config)
        environment = self.args.environment
        pool = Environments(environment, path, end_token_ids(path, tokenizer), prep=self.prep)
        self.prompts = prompts(path, tokenizer, self.prep)
        order = PromptOrder(1, 0, shuffle=False)
        self.job = SimpleNamespace(
            path=path, tokenizer=tokenizer, prompts=self.prompts, order=order, environments=pool, val_sets=None, total_steps=1
        )
        self.engine = TransformersEngine(path, max_length=260, max_num_seqs=N)
        self.engine.version = 0
        ranks = engine_ranks()
        responses = make_responses(self.args, self.job, self.engine, ranks)
        self.generator = Generator(self.engine, self.job, ScriptedPool(7.0), self.args, ranks, responses=responses)

    def group(self, steps: int | None = None, recorded: Group | None = None) -> Group:
        """The group when it is whole, or after this many steps of the engine, as it travels."""
        self.generator.start(0, recorded)
        done, taken = [], 0
        while not done and (steps is None or taken < steps):
            outputs = self.generator.decode()
            taken += bool(self.engine.running)
            done = self.generator.score(outputs)
        self.job.environments.close()
        (group,) = done or self.generator.unfinished()
        return Group.from_bytes(group.to_bytes())

    def learned(self, group: Group) -> list[torch.Tensor]:
        """The learner's log-probs of each response's sampled tokens, all in one row."""
        batch = Batch.of([group])
        batch.images = BatchImages(self.prompts, self.job.order, [group])
        micro = MicroBatch.of(batch, list(range(N)), torch.device("cpu"))
        policy = Policy(load_weights(self.job.path, torch.float32))
        with torch.no_grad():
            log_prob, _ = policy(micro.inputs, micro.layout, micro.predict, micro.labels, 1.0, "none")
        return [log_prob[batch.seq[micro.index] == number] for number in range(N)]


def of_the_data(path, tokenizer, prep) -> PromptDataset:
    dataset = PromptDataset(["demo-vl"], "train", tokenizer, DataArgs(max_prompt_length=100), prep)
    dataset.rows = [3]
    return dataset


def brought(path, tokenizer, prep):
    row = {"ground_truth": str(NUMBER)}
    return type("Prompts", (list,), {"prep": prep})([Prompt([], "", "demo", str(NUMBER), {}, "", row=row)])


@torch.no_grad()
def conversation_log_probs(path: str, pictures: list[np.ndarray], ids: list[int]) -> torch.Tensor:
    """transformers' log-probs of all tokens but the first, of a conversation with these images."""
    reader = AutoModelForImageTextToText.from_pretrained(path)
    processor = AutoImageProcessor.from_pretrained(path, backend="pil")
    inputs = processor([Image.fromarray(shown) for shown in pictures], return_tensors="pt")
    ids = torch.tensor([ids])
    kinds = (ids == reader.config.image_token_id).int()
    logits = reader(input_ids=ids, mm_token_type_ids=kinds, **inputs).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)


def rendered(tokenizer, said: list[str]) -> str:
    """The template's text of this conversation, each of the model's turns after an image; one image token for each."""
    messages = []
    for text in said:
        messages.append({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]})
        messages.append({"role": "assistant", "content": text})
    return tokenizer.apply_chat_template(messages, tokenize=False)


def check(path: str, world: World, group: Group) -> None:
    """Images, texts and log-probs of every response, each of which may have ended in a turn without an end."""
    tokenizer, pad = world.job.tokenizer, world.prep.image_token
    first = np.asarray(picture(NUMBER)) if group.image_files else to_rgb(ROW["images"][0]["bytes"])
    log_probs = world.learned(group)
    for response, of_learner in zip(group.responses, log_probs, strict=True):
        shown = [to_rgb(file.tobytes()) for file in response.images]
        assert len(shown) == 1 and np.array_equal(shown[0], np.asarray(picture(following(NUMBER))))
        ids = [*group.prompt_ids.tolist(), *response.token_ids.tolist()]
        once = [token for i, token in enumerate(ids) if token != pad or ids[i - 1] != pad]
        turns = tokenizer.decode(response.token_ids[response.mask])
        assert tokenizer.decode(once) == rendered(tokenizer, turns.removesuffix("<|end|>").split("<|end|>"))
        sampled = np.concatenate([np.zeros(len(group.prompt_ids), bool), response.mask])
        theirs = conversation_log_probs(path, [first, *shown], ids)[sampled[1:]]
        engine = torch.from_numpy(response.log_probs[response.mask].copy())
        torch.testing.assert_close(engine, theirs, atol=2e-5, rtol=0)
        torch.testing.assert_close(of_learner, theirs, atol=2e-5, rtol=0)
        other = conversation_log_probs(path, [first, first], ids)[sampled[1:]]
        assert (other - theirs).abs().max() > 0.01, "it depends on the image"


CASES = {"Shows": of_the_data, "Begins": brought}


@pytest.mark.parametrize("name", CASES)
def test_log_probs_are_those_of_transformers_and_of_the_learner(demo_vl_model, name):
    world = World(demo_vl_model, CASES[name], env=f"{SHOWS}:{name}")
    group = world.group()
    assert all(response.extra["turns"] == 2 for response in group.responses)
    check(demo_vl_model, world, group)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_response_that_was_stopped_anywhere_continues_as_it_was(demo_vl_model, name):
    whole = World(demo_vl_model, CASES[name], env=f"{SHOWS}:{name}").group()
    for steps in (3, 5):
        stopped = World(demo_vl_model, CASES[name], env=f"{SHOWS}:{name}").group(steps)
        assert steps < 4 or any(response.images for response in stopped.responses)
        again = World(demo_vl_model, CASES[name], env=f"{SHOWS}:{name}").group(recorded=stopped)
        for one, other in zip(whole.responses, again.responses, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist() and other.extra["restarts"] == 0
            assert [file.tobytes() for file in one.images] == [file.tobytes() for file in other.images]
            np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5)


@pytest.mark.slow
def test_an_environment_that_shows_another_image_starts_over(demo_vl_model):
    stopped = World(demo_vl_model, of_the_data, env=f"{SHOWS}:Differs").group(5)
    again = World(demo_vl_model, of_the_data, env=f"{SHOWS}:Differs").group(recorded=stopped)
    restarts = [response.extra["restarts"] for response in again.responses]
    assert restarts == [float(bool(response.images)) for response in stopped.responses] and any(restarts)


@pytest.mark.slow
def test_an_agent_s_images_are_in_each_of_its_conversations(demo_vl_model, tmp_path):
    """By chat completions; test_protocols.py has images in the other forms."""
    (tmp_path / "pictures.py").write_text(AGENT)
    world = World(demo_vl_model, brought, agent=f"{sys.executable} {tmp_path / 'pictures.py'}")
    group = world.group()
    log_probs = world.learned(group)
    for response, of_learner in zip(group.responses, log_probs, strict=True):
        assert len(response.histories) == 2 and len(response.images) == 3 and response.score is not None
        shown = [to_rgb(file.tobytes()) for file in response.images]
        numbers = (following(NUMBER), NUMBER + 1, NUMBER + 2)
        assert all(np.array_equal(of, np.asarray(picture(number))) for of, number in zip(shown, numbers, strict=True))
        ids, at = response.token_ids.tolist(), response.histories[0]
        own = conversation_log_probs(demo_vl_model, [np.asarray(picture(NUMBER)), shown[0]], [*group.prompt_ids, *ids[:at]])
        fork = conversation_log_probs(demo_vl_model, shown[1:], ids[at:])
        theirs = torch.cat([own[len(group.prompt_ids) - 1 :], torch.zeros(1), fork])[torch.from_numpy(response.mask.copy())]
        torch.testing.assert_close(torch.from_numpy(response.log_probs[response.mask].copy()), theirs, atol=2e-5, rtol=0)
        torch.testing.assert_close(of_learner, theirs, atol=2e-5, rtol=0)


def test_a_model_of_text_says_that_it_takes_no_image(make_pool):
    pool = make_pool(f"{SHOWS}:Shows")
    begin(pool, 0, "37", prompt=[{"role": "user", "content": QUESTION}])
    pool.ask(0, "step", ids=ids_of("37<|im_end|>"))
    found = answers(pool, [0])[0]
    assert found["event"] == "bad_value" and "--model takes text alone" in found["message"]
