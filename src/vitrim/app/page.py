"""The page, in gradio: its inputs, outputs and events. Everything that computes is in `vitrim.app.service`.

Nothing of a user is kept: every event gets all it needs from the page, and returns all it has to the page.
"""

from __future__ import annotations

import base64
import json
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr
from jinja2 import Environment, FileSystemLoader

from vitrim.app.messages import Choice, Limits, Reply, Slide
from vitrim.errors import VitrimError

if TYPE_CHECKING:
    from vitrim.app.worker import Worker

__all__ = ["EXAMPLES", "Events", "command_of", "html", "make_page", "python_of", "theme"]

FIRST_METHOD = "tome"
WAITING = 16
KEPT_SECONDS = 600
FOLDER = Path(__file__).parent
CSS = FOLDER / "page.css"
EXAMPLES = {
    name: FOLDER / "examples" / f"{name}.png"
    for name in ("ship", "airplane", "automobile", "truck", "frog", "horse", "bird", "cat")
}
"""Drawings of things that CIFAR-10 has classes for, free of anybody's rights."""
SHOW_BLOCK = """(block) => {
  for (const one of document.querySelectorAll('.v-pictures figure[data-block]')) {
    one.hidden = Number(one.dataset.block) !== Number(block);
  }
}"""
"""The pictures of all blocks are on the page already; the slider only says which one is visible."""
EVENT: dict[str, Any] = {
    "preprocess": False,  # the file as it was uploaded; gradio would convert it, and fail in its own words
    "api_visibility": "private",
    "concurrency_limit": 1,
    "concurrency_id": "work",
}
"""Options of every event: no API, and one job at a time over all events."""
TEMPLATES = Environment(loader=FileSystemLoader(FOLDER), autoescape=True)
TEMPLATES.filters["base64"] = lambda content: base64.b64encode(content).decode()


class Events:
    """The functions behind the page's events. They keep nothing but what the server was started with.

    Args:
        jobs: runs the models.
        limits: of uploads.
    """

    def __init__(self, jobs: Worker, limits: Limits) -> None:
        self.jobs = jobs
        self.limits = limits
        self.slides = {offer.name: offer.slides for offer in jobs.offers}

    def model(self, model: str, method: str) -> tuple[Any, Any]:
        """The methods of a model, and the slider of the one that is chosen."""
        slides = self.slides.get(str(model), {})
        chosen = method if method in slides else next(iter(slides), None)
        return gr.update(choices=list(slides), value=chosen), self.method(model, chosen)

    def method(self, model: str, method: str | None) -> Any:
        """The slider of a method."""
        slide = self.slides.get(str(model), {}).get(str(method))
        return gr.update(interactive=False) if slide is None else gr.update(**_slider(slide), interactive=True)

    def run(
        self, image: Any, model: str, method: str, value: float, more: str, block: float
    ) -> tuple[Any, Any, Any, Any, Any, Any]:
        """A result as the page shows it, or one line where it would stand.

        Args:
            image: the file as gradio hands it over, ``{"path": ...}``; None for none.
            model, method, value, more: see `vitrim.app.messages.Choice`.
            block: the one that is looked at; the last one if there are not so many.

        Returns:
            Pictures, numbers, the slider over blocks, the method's text, the Python lines, the command.
        """
        try:
            if image is None:
                raise VitrimError("give an image: upload or paste one, or take an example")
            choice = Choice(str(model), str(method), value, str(more or ""))
            result: Reply = self.jobs.call("run", _content(image, self.limits), choice, first=("offer", choice.model))
        except VitrimError as error:
            return "", html("result", error=str(error)), gr.update(), "", "", ""
        last = len(result.pictures) - 2
        shown = min(int(block), last) if isinstance(block, int | float) and block >= 0 else last
        slider = gr.update(maximum=last, value=shown)
        pictures = html("pictures", pictures=result.pictures, block=shown)
        return pictures, html("result", result=result), slider, result.method, python_of(result), command_of(result)

    def front(self, file: Any) -> str:
        """The front of an uploaded file, or one line where it would stand."""
        if file is None:
            return ""
        try:
            return html("front", front=self.jobs.call("front", _content(file, self.limits)))
        except VitrimError as error:
            return html("front", error=str(error))


def _content(file: Any, limits: Limits) -> bytes:
    """The bytes of an uploaded file; gradio has checked that it is one of its uploads.

    Raises:
        VitrimError: it is too large, or was deleted meanwhile.
    """
    path = Path(str(file["path"] if isinstance(file, dict) else file))
    try:
        size = path.stat().st_size
        if size > limits.megabytes * 1e6:
            raise VitrimError(f"the file has {size / 1e6:.1f} MB; at most {limits.megabytes:g} MB are read")
        return path.read_bytes()
    except OSError as error:
        raise VitrimError("the upload is no longer there: uploads are deleted after a while; give it again") from error


def _slider(slide: Slide) -> dict[str, Any]:
    return {
        "label": slide.label,
        "info": slide.info,
        "minimum": slide.low,
        "maximum": slide.high,
        "step": slide.step,
        "value": slide.value,
    }


def theme() -> Any:
    """gradio's own theme with a contrast of text of at least 4.5 to 1."""
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
    """The page, not yet served: a `gradio.Blocks`.

    Args:
        jobs: runs the models; its offers are the models of the page.
        limits: of uploads.
        folder: for copies of the example images.
    """
    events = Events(jobs, limits)
    page = gr.Blocks(
        analytics_enabled=False,
        title="vitrim: what is left of an image",
        delete_cache=(KEPT_SECONDS, KEPT_SECONDS),
        fill_width=True,
    )
    with page:
        gr.Markdown("# What is left of an image\nA Vision Transformer with fewer tokens, beside the same one with all.")
        with gr.Tab("Image"):
            # gradio serves files of its temporary folder only
            drawings = [str(shutil.copy(example, folder)) for example in EXAMPLES.values()]
            _image_tab(page, events, limits, drawings)
        with gr.Tab("Front of a search"):
            file = gr.File(label="front.json of `vitrim tune --front`", file_types=[".json"], height=140)
            file.change(events.front, file, gr.HTML(), **EVENT)
    page.queue(max_size=WAITING, default_concurrency_limit=1, api_open=False)
    return page


def _image_tab(page: Any, events: Events, limits: Limits, drawings: Sequence[str]) -> None:
    offers = list(events.slides)
    slides = events.slides[offers[0]]
    first = FIRST_METHOD if FIRST_METHOD in slides else next(iter(slides))
    with gr.Row():
        with gr.Column(scale=2, min_width=280):
            image = gr.Image(
                drawings[0],
                label=f"image, up to {limits.megabytes:g} MB",
                type="filepath",
                image_mode=None,
                sources=["upload", "clipboard"],
                height=260,
                buttons=[],
                alt_text="the image that was chosen",
            )
            gr.Examples(
                [[one] for one in drawings],
                image,
                label="examples",
                api_visibility="private",
                example_labels=list(EXAMPLES),
            )
            model = gr.Dropdown(offers, value=offers[0], label="model", elem_id="v-model", interactive=True)
            method = gr.Dropdown(list(slides), value=first, label="method", elem_id="v-method", interactive=True)
            value = gr.Slider(**_slider(slides[first]), elem_id="v-amount", interactive=True)
            with gr.Accordion("More options", open=False):
                more = gr.Textbox(
                    label="further options of the method", info="key=value,key=value; Enter runs", max_length=300
                )
            button = gr.Button("Run", variant="primary")
        with gr.Column(scale=3, min_width=280):
            block = gr.Slider(
                0, 11, value=11, step=1, label="what is left after block", elem_id="v-block", interactive=True
            )
            pictures = gr.HTML()
            numbers = gr.HTML()
            text = gr.Textbox(label="method", elem_id="v-text", buttons=["copy"], interactive=False)
            python = gr.Textbox(label="in Python", elem_id="v-python", lines=5, buttons=["copy"], interactive=False)
            command = gr.Textbox(label="on the command line", elem_id="v-command", buttons=["copy"], interactive=False)
    inputs, outputs = [image, model, method, value, more, block], [pictures, numbers, block, text, python, command]
    job: dict[str, Any] = {"inputs": inputs, "outputs": outputs, **EVENT}
    model.input(events.model, [model, method], [method, value], **EVENT).then(events.run, **job)
    method.input(events.method, [model, method], value, **EVENT).then(events.run, **job)
    triggers = [image.change, value.input, more.submit, button.click, page.load]
    gr.on(triggers, events.run, trigger_mode="always_last", **job)
    block.change(None, block, js=SHOW_BLOCK, **EVENT)


# ---- results as HTML and as text to copy; whatever a user typed or uploaded is escaped ------------------------------


def html(template: str, **values: Any) -> str:
    """A result by the template of that name: ``pictures``, ``result`` or ``front``; or an ``error`` in its place.

    Example:
        >>> html("result", error="not <b>an image").strip()
        '<p class="v-error" role="alert">not &lt;b&gt;an image</p>'
    """
    return TEMPLATES.get_template(f"{template}.html.jinja").render(**values)


def python_of(result: Reply) -> str:
    """The Python lines that reduce this model in the same way; ``CHECKPOINT`` stands for a file of weights."""
    lines = ["import vitrim", "from vitrim.loading import create_model", ""]
    given = [repr(result.model)]
    given += ["checkpoint='CHECKPOINT'"] if result.checkpoint else []
    given += ["pretrained=True"] if result.weights == "pretrained" else []
    given += [f"options={dict(result.options)!r}"] if result.options else []
    lines += [f"model = create_model({', '.join(given)})"]
    return "\n".join([*lines, f"reduction = vitrim.reduce_(model, {result.method!r})"])


def command_of(result: Reply) -> str:
    """The command that writes the same pictures; ``CHECKPOINT`` stands for a file of weights."""
    weights = " --checkpoint CHECKPOINT" if result.checkpoint else ""
    weights = " --pretrained" if result.weights == "pretrained" else weights
    options = ""
    for key, value in result.options.items():
        text = value if isinstance(value, str) else json.dumps(value)
        options += f" --model-option {shlex.quote(f'{key}={text}')}"
    return f'vitrim show "{result.model}" IMAGE{weights}{options} -m "{result.method}" --out pictures'
