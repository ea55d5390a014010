"""The page, in gradio: its inputs, outputs and events. Events are stateless: they get and return all that they need."""

from __future__ import annotations

import base64
import json
import re
import shlex
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from vitrim.app.messages import MOST_BESIDE, Limits, Reply, Settings
from vitrim.app.photographs import EXAMPLES
from vitrim.errors import VitrimError

if TYPE_CHECKING:
    from vitrim.app.worker import Worker

FIRST_METHODS = ("tome", "atm", "topk")
"""The methods shown initially (docs/choosing.md)."""
WAITING = 16
KEPT_SECONDS = 600
FOLDER = Path(__file__).parent
CSS = FOLDER / "page.css"
SHOW_BLOCK = """(block) => {
  for (const one of document.querySelectorAll('.v-card figure[data-block]')) {
    one.hidden = Number(one.dataset.block) !== Number(block);
  }
}"""
"""The page contains the pictures of all blocks; the slider selects the visible one."""
EVENT: dict[str, Any] = {
    "preprocess": False,  # the original file; gradio would convert it, with errors of its own
    "api_visibility": "private",
    "concurrency_limit": 1,
    "concurrency_id": "work",
}
"""Options of every event: no API, and one job at a time."""
TEMPLATES = Environment(loader=FileSystemLoader(FOLDER), autoescape=True)
TEMPLATES.filters["base64"] = lambda content: base64.b64encode(content).decode()
TEMPLATES.filters["breaking"] = lambda text: Markup(re.sub("([:,])", r"\1<wbr>", str(escape(text))))
"""The text of a method that may wrap only after an option."""


class Events:
    """The handlers of the page's events; ``jobs`` runs the models, ``folder`` is for copies of the example images."""

    def __init__(self, jobs: Worker, folder: Path) -> None:
        self.jobs = jobs
        self.slides = {offer.name: offer.slides for offer in jobs.offers}
        self.known = {offer.name: list(offer.examples) for offer in jobs.offers}
        # gradio serves only files of its temporary folder
        self.files = {one.name: str(shutil.copy(one.path, folder)) for one in EXAMPLES}

    def model(self, model: str, method: str, image: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Updates for a new model: its methods, the slider, the methods beside, the examples, and the image.

        An example that the model does not know is replaced.
        """
        slides, known = self.slides.get(str(model), {}), self.known.get(str(model), [])
        chosen = method if method in slides else next(iter(slides), None)
        file = Path(str(image["path"])).name if isinstance(image, dict) else None
        shown = next((name for name, own in self.files.items() if Path(own).name == file), None)
        # An upload stays; an example that the new model gets wrong would look like the method's fault.
        taken = known[0] if known and shown is not None and shown not in known else None
        beside = [name for name in FIRST_METHODS if name in slides and name != chosen]
        return (
            gr.update(choices=list(slides), value=chosen),
            self.method(model, chosen),
            gr.update(choices=list(slides), value=beside[: MOST_BESIDE - 1]),
            gr.update(choices=known, value=taken or shown),
            gr.skip() if taken is None else self.files[taken],
        )

    def method(self, model: str, method: str | None) -> Any:
        slide = self.slides.get(str(model), {}).get(str(method))
        return gr.update(interactive=False) if slide is None else gr.update(**asdict(slide), interactive=True)

    def example(self, name: str) -> Any:
        """The file of an example; no change for an unknown name."""
        return self.files.get(str(name), gr.skip())

    def run(
        self, image: Any, model: str, method: str, value: float, more: str, beside: Any, block: float
    ) -> tuple[Any, Any, Any, Any, Any]:
        """A result as HTML, or an error in one line; the slider over blocks, and the texts to copy.

        ``image`` is gradio's description of the file, ``{"path": ...}``, or None; ``block`` is the visible one, at most
        the last.
        """
        try:
            if image is None:
                raise VitrimError("give an image: upload or paste one, or take an example")
            others = tuple(map(str, beside)) if isinstance(beside, list) else ()
            choice = Settings(str(model), str(method), value, str(more or ""), others)
            result: Reply = self.jobs.call("run", _content(image), choice, first=("offer", choice.model))
        except VitrimError as error:
            return html("result", error=str(error)), gr.update(), "", "", ""
        # Another model may have fewer blocks than the slider had.
        last = len(result.reduced[0].pictures) - 1
        shown = min(int(block), last) if isinstance(block, int | float) and block >= 0 else last
        slider = gr.update(maximum=last, value=shown)
        texts = "\n".join(one.method for one in result.reduced)
        drawn = html("result", result=result, block=shown)
        return drawn, slider, texts, python_of(result), command_of(result)

    def front(self, file: Any) -> str:
        if file is None:
            return ""
        try:
            return html("front", front=self.jobs.call("front", _content(file)))
        except VitrimError as error:
            return html("front", error=str(error))


def _content(file: Any) -> bytes:
    """The bytes of an uploaded file; gradio has checked its place and size."""
    try:
        return Path(str(file["path"] if isinstance(file, dict) else file)).read_bytes()
    except OSError as error:
        raise VitrimError("the upload is no longer there: uploads are deleted after a while; give it again") from error


def theme() -> Any:
    """gradio's default theme with a text contrast of at least 4.5 to 1."""
    plain = gr.themes.Default(primary_hue="blue", font=["system-ui", "sans-serif"], font_mono=["monospace"])
    return plain.set(
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_300",
        block_label_text_color="*neutral_700",
        block_title_text_color="*neutral_700",
        block_info_text_color="*neutral_600",
        block_info_text_color_dark="*neutral_300",
        input_placeholder_color="*neutral_600",
        input_placeholder_color_dark="*neutral_300",
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_dark="*primary_700",
        slider_color="*primary_700",
        slider_color_dark="*primary_400",
        color_accent="*primary_700",
    )


def make_page(jobs: Worker, limits: Limits, folder: Path) -> Any:
    """The page, a `gradio.Blocks`; see `Events`."""
    events = Events(jobs, folder)
    page = gr.Blocks(
        analytics_enabled=False,
        title="vitrim: what is left of an image",
        delete_cache=(KEPT_SECONDS, KEPT_SECONDS),
        fill_width=True,
    )
    with page:
        gr.Markdown("# What is left of an image\nA Vision Transformer with fewer tokens, beside the same one with all.")
        with gr.Tab("Image"):
            _image_tab(page, events, limits)
        with gr.Tab("Front of a search"):
            file = gr.File(label="front.json of `vitrim tune --front`", file_types=[".json"], height=140)
            file.change(events.front, file, gr.HTML(), **EVENT)
    page.queue(max_size=WAITING, default_concurrency_limit=1, api_open=False)
    return page


def _image_tab(page: Any, events: Events, limits: Limits) -> None:
    with gr.Row():
        with gr.Column(scale=2, min_width=280):
            image, examples, model, method, value, beside, more, button = _choices(events, limits)
        with gr.Column(scale=5, min_width=280):
            block, result, *texts = _results()
    inputs, outputs = [image, model, method, value, more, beside, block], [result, block, *texts]
    job: dict[str, Any] = {"inputs": inputs, "outputs": outputs, **EVENT}
    chosen = [method, value, beside, examples, image]
    model.input(events.model, [model, method, image], chosen, **EVENT).then(events.run, **job)
    method.input(events.method, [model, method], value, **EVENT).then(events.run, **job)
    examples.input(events.example, examples, image, **EVENT)
    gr.on([image.upload, image.clear], None, None, examples, js="() => null", api_visibility="private")
    triggers = [image.change, value.input, beside.input, more.submit, button.click, page.load]
    gr.on(triggers, events.run, trigger_mode="always_last", **job)
    block.change(None, block, js=SHOW_BLOCK, **EVENT)


def _choices(events: Events, limits: Limits) -> tuple[Any, ...]:
    """The left column: image, examples, model, method, its amount, methods beside, further options, and the button."""
    offers = list(events.slides)
    slides, known = events.slides[offers[0]], events.known[offers[0]]
    started = [name for name in FIRST_METHODS if name in slides] or list(slides)[:1]
    image = gr.Image(
        events.files[known[0]],
        label=f"image, up to {limits.megabytes:g} MB",
        type="filepath",
        image_mode=None,
        sources=["upload", "clipboard"],
        height=220,
        buttons=[],
        alt_text="the image that was chosen",
    )
    examples = gr.Radio(known, value=known[0], label="or one that the model knows", elem_id="v-examples")
    model = gr.Dropdown(offers, value=offers[0], label="model", elem_id="v-model", interactive=True)
    method = gr.Dropdown(list(slides), value=started[0], label="method", elem_id="v-method", interactive=True)
    value = gr.Slider(**asdict(slides[started[0]]), elem_id="v-amount", interactive=True)
    beside = gr.Dropdown(
        list(slides),
        value=started[1:],
        multiselect=True,
        max_choices=MOST_BESIDE,
        label="beside it, at the same MACs",
        elem_id="v-beside",
        interactive=True,
    )
    with gr.Accordion("More options", open=False):
        more = gr.Textbox(label="further options of the method", info="key=value,key=value; Enter runs", max_length=300)
    button = gr.Button("Run", variant="primary")
    credits = "; ".join(f"{one.name}, {one.credit}" for one in EXAMPLES if one.credit)
    gr.Markdown(f"Photographs: {credits}.", elem_id="v-credits")
    return image, examples, model, method, value, beside, more, button


def _results() -> tuple[Any, ...]:
    """The right column: the slider over blocks, the pictures and numbers, and three texts to copy."""
    block = gr.Slider(
        0, 11, value=11, step=1, label="what is left after block (counted from 0)", elem_id="v-block", interactive=True
    )
    result = gr.HTML()
    with gr.Accordion("Take it with you", open=True):
        copied: dict[str, Any] = {"buttons": ["copy"], "interactive": False}
        text = gr.Textbox(label="methods", elem_id="v-text", **copied)
        python = gr.Textbox(label="in Python", elem_id="v-python", lines=5, **copied)
        command = gr.Textbox(label="on the command line", elem_id="v-command", **copied)
    return block, result, text, python, command


# ---- results as HTML and as text to copy; all input is escaped -------------------------------------------------------


def html(template: str, **values: Any) -> str:
    """Render the template ``result`` or ``front``; or an ``error``.

    Example:
        >>> html("result", error="not <b>an image").strip()
        '<p class="v-error" role="alert">not &lt;b&gt;an image</p>'
    """
    return TEMPLATES.get_template(f"{template}.html.jinja").render(**values)


def python_of(result: Reply) -> str:
    """The Python lines that reduce this model by the first method, with ``CHECKPOINT`` for a file of weights."""
    lines = ["import vitrim", "from vitrim.loading import create_model", ""]
    given = [repr(result.model)]
    given += ["checkpoint='CHECKPOINT'"] if result.checkpoint else []
    given += ["pretrained=True"] if result.weights == "pretrained" else []
    given += [f"options={dict(result.options)!r}"] if result.options else []
    lines += [f"model = create_model({', '.join(given)})"]
    return "\n".join([*lines, f"reduction = vitrim.reduce_(model, {result.reduced[0].method!r})"])


def command_of(result: Reply) -> str:
    """The command that writes the same pictures, with ``CHECKPOINT`` for a file of weights."""
    weights = " --checkpoint CHECKPOINT" if result.checkpoint else ""
    weights = " --pretrained" if result.weights == "pretrained" else weights
    options = ""
    for key, value in result.options.items():
        text = value if isinstance(value, str) else json.dumps(value)
        options += f" --model-option {shlex.quote(f'{key}={text}')}"
    methods = "".join(f' -m "{one.method}"' for one in result.reduced)
    return f'vitrim show "{result.model}" IMAGE{weights}{options}{methods} --out pictures'
