"""Chat templates: what transformers renders, and what hostile ones do. Each test starts a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from shoal.errors import InputError, SetupError
from shoal.kit.generation import rendering, templates
from shoal.kit.generation.templates import ChatTemplate, find_python
from shoal.system.processes import find_descendants, find_process

pytestmark = pytest.mark.usefixtures("may_start_processes")
CHAT = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "  Olá: 'naïve' <b>&\n\u2028 😀 "},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why?"},
]
CHATML = """{% for message in messages %}
    {% if loop.first and messages[0]['role'] != 'system' %}
{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}
    {% endif %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
PARTS = """{{ bos_token }}{% set ns = namespace(system='', count=0) %}
{%- for m in messages %}
    {%- if m.role == 'system' %}{% set ns.system = m.content %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- if m.role == 'assistant' %}{% generation %}[{{ m.content | trim }}]{% endgeneration %}{% else %}
        {{- m.content | tojson }}{{ dict(a=ns.system) | tojson(indent=2) }}
    {%- endif %}
    {%- if ns.count > 2 %}{% break %}{% endif %}
{% endfor %}
{% if tools is none and documents is none %}{{ ns.count }}{% endif %}{{ strftime_now('%Y') | length }}
"""
ECHO = "{% for m in messages %}{{ m.content }}{% endfor %}"
HOSTILE = {
    "{% for i in range(10**9) %}x{% endfor %}": "OverflowError: Range too big",
    "{{ 'x' * 10**10 }}": "512 MiB of memory",
    "{{ ('x' * 10**6).replace('x', 'x' * 10**6) }}": "512 MiB of memory",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "more than 2 s",
    "{{ 10 ** (10 ** 9) }}": "more than 2 s",
    "{% set ns = namespace(t='x' * 64) %}{% for i in range(99) %}{% set ns.t = ns.t + ns.t %}{% endfor %}{{ ns.t }}": (
        "512 MiB of memory"
    ),
    "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}": "the text has more than 16,777,216 characters",
    "{{ ''.__class__.__mro__ }}": "SecurityError: access to attribute '__class__'",
    "{{ dict.__init__.__globals__ }}": "SecurityError: access to attribute '__init__'",
    "{% set ns = namespace(__class__=1) %}": "SecurityError: a namespace cannot hold '__class__'",
    "{{ messages.append(1) }}": "SecurityError",
    "{{ raise_exception('Roles must\nalternate.') }}": "render these messages: Roles must alternate. Change",
    "{{ messages[0].content.a.b }}": "UndefinedError",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
    "{% include '/etc/passwd' %}": "TypeError: no loader",
    r"{{ '\ud800' }}": "UnicodeEncodeError",
    "{% if %}": "is not valid: TemplateSyntaxError",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}": "is not valid: RecursionError",
}


def find_renderers() -> list[int]:
    """The ids of the processes that this one renders with."""
    return [child.pid for child in find_descendants(os.getpid()) if child.arguments()[-1:] == [rendering.__file__]]


@pytest.fixture
def echo() -> Iterator[ChatTemplate]:
    with closing(ChatTemplate(ECHO)) as template:
        yield template


@pytest.mark.parametrize("source", [CHATML, PARTS, ECHO])
@pytest.mark.parametrize("is_asked", [True, False])
def test_templates_render_as_in_transformers(source: str, is_asked: bool) -> None:
    rendered = render_jinja_template(
        [CHAT], chat_template=source, add_generation_prompt=is_asked, bos_token="<s>", tools=None, documents=None
    )
    expected = rendered[0][0]
    with closing(ChatTemplate(source, {"bos_token": "<s>"})) as template:
        assert template.render(CHAT, add_generation_prompt=is_asked) == expected
        assert template.render(CHAT, add_generation_prompt=is_asked) == expected


@pytest.mark.parametrize(("source", "reason"), HOSTILE.items())
def test_hostile_templates_are_refused_in_one_line(source: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason != "more than 2 s":  # beside a busy machine, the other limit is to be reached first
        monkeypatch.setattr(templates, "SECONDS", 60)
    with pytest.raises(InputError) as refused:  # noqa: SIM117
        with closing(ChatTemplate(source)) as template:
            template.render(CHAT)
    text = str(refused.value)
    assert reason in text
    assert len(text.splitlines()) == 1
    assert "Traceback" not in text
    assert os.sep + "shoal" not in text


def test_after_each_kind_of_failure_the_next_request_is_answered() -> None:
    fail = """{% set content = messages[0].content %}
{% if content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}
{% if content == 'grow' %}{{ 'x' * 10**10 }}{% endif %}
{% if content == 'raise' %}{{ raise_exception('no') }}{% endif %}
{{ content }}"""
    with closing(ChatTemplate(fail)) as template:
        for content, reason in (("loop", "2 s"), ("grow", "512 MiB"), ("raise", "no")):
            with pytest.raises(InputError, match=reason):
                template.render([{"role": "user", "content": content}])
            assert template.render([{"role": "user", "content": "well"}]).strip() == "well"


def test_a_killed_process_is_replaced(echo: ChatTemplate) -> None:
    for _ in range(2):
        (child,) = find_renderers()
        os.kill(child, signal.SIGKILL)
        while not ((process := find_process(child)) is None or process.is_ended):
            time.sleep(0.01)
        assert echo.render(CHAT[3:]) == "Why?"
    echo.close()
    assert not find_renderers()
    assert echo.render(CHAT[3:]) == "Why?"


def test_threads_get_their_own_answers(echo: ChatTemplate) -> None:
    texts = [f"text {number} " + "é" * number * 500 for number in range(200)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: echo.render([{"role": "user", "content": text}]), texts)) == texts


def test_an_interrupted_rendering_does_not_answer_the_next(echo: ChatTemplate) -> None:
    (child,) = find_renderers()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a program in the background ignores it
    os.kill(child, signal.SIGSTOP)  # so that the interrupt comes while the answer is awaited
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012  # started before it, the interrupt might come too early
        timer.start()
        echo.render([{"role": "user", "content": "first"}])
    timer.join()
    signal.signal(signal.SIGINT, before)
    assert echo.render([{"role": "user", "content": "second"}]) == "second"


@pytest.mark.parametrize(
    "source", [ECHO, "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"]
)
def test_the_process_ends_with_its_parent(source: str) -> None:
    code = """
import sys, threading
from shoal.kit.generation.templates import ChatTemplate
from shoal.system.processes import find_descendants
import os
template = ChatTemplate(sys.argv[1])
print(find_descendants(os.getpid())[0].pid, flush=True)
template.render([{"role": "user", "content": "x"}])
sys.stdin.read()
"""
    command = [sys.executable, "-c", code, source]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    end = time.monotonic() + 30
    while (process := find_process(pid)) is not None and not process.is_ended:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_python_is_found_without_sys_executable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", "/opt/triton_python_backend_stub")
    assert subprocess.run([find_python(), "-c", ""], check=False).returncode == 0
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    with pytest.raises(SetupError, match=r"There is no python3\.\d+ in "):
        find_python()


def test_missing_and_old_versions_of_jinja_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jinja2, "__version__", "3.1.5")
    with pytest.raises(SetupError, match=r"jinja2 is 3\.1\.5, .* Type: pip install 'jinja2>=3\.1\.6'"):
        ChatTemplate(ECHO)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(SetupError, match=r"jinja2 is not installed\. Type: pip install 'shoal\[llm\]'"):
        ChatTemplate(ECHO)
