"""What a vLLM on a socket does with the requests of vllm_learning.py; each change of weights is a line of the file $RECORD:

python fake_vllm.py serve TARGET .. --uds SOCKET ..
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

app, runs, record = FastAPI(), asyncio.Event(), Path(os.environ["RECORD"])
runs.set()


def note(words: str) -> None:
    with record.open("a") as file:
        file.write(f"{words}\n")


@app.get("/health")
async def health() -> Response:
    return Response()


@app.get("/metrics")
async def metrics() -> Response:
    return Response("vllm_requests 3\n")


@app.post("/v1/completions")
async def completions(request: Request) -> Any:
    await runs.wait()
    asked = await request.json()
    if asked["prompt"] == "wrong":
        return Response('{"error": {"message": "no"}}', 400, media_type="application/json")
    tokens = (
        {"prompt_token_ids": [1, 2, len(asked["prompt"])], "token_ids": [3, 4]} if "return_token_ids" in asked else {}
    )
    answer = {"id": "c", "choices": [{"index": 0, "text": "ab", **tokens}]}
    if not asked.get("stream"):
        return answer

    async def parts() -> Any:
        for ids, text in ((tokens.get("token_ids", [])[:1], "a"), (tokens.get("token_ids", [])[1:], "b")):
            yield f"data: {json.dumps({'id': 's', 'choices': [{**tokens, 'index': 0, 'text': text, 'token_ids': ids}]})}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(parts(), media_type="text/event-stream")


@app.post("/{path}")
async def change(path: str, request: Request) -> dict[str, str]:
    body = await request.body()
    note(f"{path}?{request.url.query} {body.decode()}")
    if path == "update_weights":
        await asyncio.sleep(0.3)
    if path in ("pause", "resume"):
        (runs.clear if path == "pause" else runs.set)()
    return {}


if __name__ == "__main__":
    assert os.environ["VLLM_SERVER_DEV_MODE"] == "1"
    given = dict(zip(sys.argv[3::2], sys.argv[4::2], strict=False))
    note(f"{os.getpid()} {given['--uds']} {given['--worker-extension-cls']} {given['--weight-transfer-config']}")
    uvicorn.run(app, uds=given["--uds"], log_level="warning")
