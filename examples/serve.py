"""Answer over HTTP from an exported model; requests that arrive together run as one batch.

    vitrim export vitrim:cifar10_vit -m tome:r=11 --out m.onnx --preprocess
    python examples/serve.py m.onnx --port 8000           # then: curl --data-binary @cat.png 127.0.0.1:8000/predict
    python examples/serve.py --load m.onnx dense.onnx     # 1,000 requests by 16 clients to each, on this machine
    python examples/serve.py                              # the same, 64 requests and tiny random models, offline

A request waits until the batch before it is done, and then goes with all that have come in the meantime. Under load
batches grow by themselves; a single client never waits for others. Needs fastapi and uvicorn.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import io
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import timm
import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from PIL import Image, UnidentifiedImageError

import vitrim

LARGEST_BODY = 5_000_000
LARGEST_IMAGE = 40_000_000
"""Bytes of a request, and pixels of its image."""


class Batcher:
    """Runs images one batch at a time: a batch is what waits when the one before is done, at most ``most`` images."""

    def __init__(self, file: vitrim.Exported, most: int = 32) -> None:
        self.file = file
        self.most = most
        self.sizes: list[int] = []
        self.waiting: asyncio.Queue[tuple[np.ndarray, asyncio.Future[np.ndarray]]] = asyncio.Queue(maxsize=1024)

    async def predict(self, image: np.ndarray) -> np.ndarray:
        """The logits of one image."""
        answer: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
        try:
            self.waiting.put_nowait((image, answer))
        except asyncio.QueueFull:
            raise HTTPException(503, "too many requests are waiting") from None
        return await answer

    async def work(self) -> None:
        """Run batches until cancelled. An error is the answer to all requests of its batch."""
        while True:
            batch = [await self.waiting.get()]
            while len(batch) < self.most and not self.waiting.empty():
                batch.append(self.waiting.get_nowait())
            self.sizes.append(len(batch))
            try:
                logits = await asyncio.to_thread(self.file.run, np.stack([image for image, _ in batch]))
            except Exception as error:
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            for (_, answer), row in zip(batch, logits, strict=True):
                if not answer.done():  # its client may have gone
                    answer.set_result(row)


def make_app(file: vitrim.Exported) -> FastAPI:
    """The service: POST an image file to /predict; GET /model for what the file says about itself."""
    if file.metadata["input"]["dtype"] != "uint8":
        raise SystemExit(f"{file.path} takes normalised images: export it with --preprocess")
    batcher = Batcher(file)
    _, height, width, _ = file.shape

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker = asyncio.create_task(batcher.work())
        yield
        worker.cancel()

    app = FastAPI(title="vitrim", lifespan=lifespan)
    app.state.batcher = batcher

    @app.post("/predict")
    async def predict(request: Request) -> dict[str, Any]:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > LARGEST_BODY:
                raise HTTPException(413, f"an image of at most {LARGEST_BODY} bytes, please")
        image = await asyncio.to_thread(decode, bytes(body), int(height), int(width))
        logits = await batcher.predict(image)
        best = int(logits.argmax())
        names = file.metadata["classes"]
        return {"class": names[best] if names else best, "logits": [float(logit) for logit in logits]}

    @app.get("/model")
    async def about() -> dict[str, Any]:
        return dict(file.metadata)

    return app


def decode(body: bytes, height: int, width: int) -> np.ndarray:
    """An image file as (H, W, 3) uint8. Squashed to the size: a service for real images crops as the metadata say."""
    try:
        image = Image.open(io.BytesIO(body))
        if image.width * image.height > LARGEST_IMAGE:
            raise HTTPException(413, f"an image of at most {LARGEST_IMAGE} pixels, please")
        return np.asarray(image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC))
    except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError) as error:
        raise HTTPException(422, "the body is not an image that can be read") from error


# ---- under load ------------------------------------------------------------------------------------------------------


@contextmanager
def serving(app: FastAPI, port: int = 0) -> Iterator[int]:
    """Run the service in a thread on the loopback address; yields its port."""
    # without a set-up of logs, which would close the handlers of everything else in this process
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_config=None, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise SystemExit("the service did not start")
        time.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def load(file: vitrim.Exported, requests: int, clients: int = 16) -> str:
    """Send images from several clients at once, compare every answer with the image run alone, and time them."""
    _, height, width, _ = file.shape
    random = np.random.default_rng(0)
    images = [random.integers(0, 256, (int(height), int(width), 3), dtype=np.uint8) for _ in range(16)]
    bodies = [png(image) for image in images]
    expected = [file.run(image[None])[0] for image in images]
    app = make_app(file)
    with serving(app) as port:

        def client(number: int) -> list[tuple[float, bool]]:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            found = []
            for index in range(number, requests, clients):
                start = time.perf_counter()
                connection.request("POST", "/predict", bodies[index % 16])
                logits = json.loads(connection.getresponse().read())["logits"]
                right = np.allclose(logits, expected[index % 16], atol=1e-4)
                found.append((time.perf_counter() - start, right))
            connection.close()
            return found

        start = time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            results = [result for own in pool.map(client, range(clients)) for result in own]
        seconds = time.perf_counter() - start
    p50, p95 = (1e3 * float(np.percentile([taken for taken, _ in results], part)) for part in (50, 95))
    right = sum(right for _, right in results)
    mean = np.mean(app.state.batcher.sizes)
    return (
        f"{file.metadata['method']}: {right} of {requests} answers right, p50 {p50:.1f} ms, p95 {p95:.1f} ms, "
        f"{requests / seconds:.0f} per second, {mean:.1f} images per batch"
    )


def png(image: np.ndarray) -> bytes:
    """An image as a file."""
    out = io.BytesIO()
    Image.fromarray(image).save(out, "PNG")
    return out.getvalue()


def tiny(folder: Path) -> list[vitrim.Exported]:
    """An untrained model, dense and reduced: this runs without a download. For torch, as that is written quickly."""
    torch.manual_seed(0)
    model = timm.create_model("test_vit", img_size=32, patch_size=8, depth=2, num_classes=3)
    wanted = vitrim.FileSpec(preprocess=True)
    return [
        vitrim.export(model, method, folder / f"{number}.pt2", wanted, check=3)
        for number, method in enumerate((None, "tome:r=4"))
    ]


def opened(path: str, threads: int | None, trust: bool = False) -> vitrim.Exported:
    """An exported file that runs on so many threads: those of its engine, or torch's where the engine has none."""
    file = vitrim.Exported.open(path, trust=trust)
    if threads is None:
        return file
    if file.kind.own_threads:
        return replace(file, threads=threads)
    torch.set_num_threads(threads)
    return file


def main(arguments: list[str] | None = None) -> None:
    """Serve a file, or load several in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="exported with --preprocess")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--threads", type=int, help="of the engine")
    parser.add_argument("--trust", action="store_true", help="the files may be code, as .pt2 files are")
    parser.add_argument("--load", action="store_true", help="1,000 requests to each file instead of serving one")
    given = parser.parse_args(arguments)
    files = [opened(path, given.threads, given.trust) for path in given.files]
    if not files:
        with TemporaryDirectory() as folder:
            for file in tiny(Path(folder)):
                print(load(file, 64))
    elif given.load:
        for file in files:
            print(load(file, 1000))
    else:
        uvicorn.run(make_app(files[0]), host="127.0.0.1", port=given.port)


if __name__ == "__main__":
    main()
