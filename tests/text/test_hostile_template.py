"""A template from a stranger ends soon, in little memory, and with one sentence."""

# ruff: noqa: E501, a hostile template reads best in one line

import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bankfull.errors import BankfullError, RequestError
from bankfull.text import render_process
from bankfull.text.render_process import RenderProcess, Source, short_calls
from bankfull.text.template import ChatTemplate

DOUBLING = (
    "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set ns.s = %s %}{% endfor %}{{ ns.s|length }}"
)
TOWERS = (
    "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
)
HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "loops with no output": "{% set ns=namespace(x=0) %}{% for a in range(99999) %}{% for b in range(99999) %}{% set ns.x = a+b %}{% endfor %}{% endfor %}",
    "a huge range": "{% for a in range(10**9) %}x{% endfor %}",
    "much text": "{% for a in range(99999) %}" + "x" * 10_000 + "{% endfor %}",
    "much captured text": "{% set s %}{% for a in range(99999) %}" + "x" * 10_000 + "{% endfor %}{% endset %}",
    "string multiplication": "{{ 'a' * 10**9 }}",
    "constant multiplication": "{{ ('a' * 1000000) * 1000000 }}",
    "list multiplication": "{{ ([1] * 10**9)|length }}",
    "reversed multiplication": "{{ 10**9 * 'a' }}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "negative base power": "{{ (0-7) ** 99999999 }}",
    "squares": "{% set ns=namespace(x=3) %}{% for a in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
    "doubling by +": DOUBLING.replace("%s", "ns.s + ns.s"),
    "doubling by ~": DOUBLING.replace("%s", "ns.s ~ ns.s"),
    "doubling by join": DOUBLING.replace("%s", "[ns.s, ns.s]|join"),
    "doubling by str.join": DOUBLING.replace("%s", "ns.s.join([ns.s, ns.s])"),
    "doubling by replace": DOUBLING.replace("%s", "ns.s|replace('a', 'aa')"),
    "doubling by str.replace": DOUBLING.replace("%s", "ns.s.replace('a', ns.s)"),
    "doubling by empty replace": DOUBLING.replace("%s", "ns.s.replace('', ns.s)"),
    "doubling by format": DOUBLING.replace("%s", "'{}{}'.format(ns.s, ns.s)"),
    "doubling by the format filter": DOUBLING.replace("%s", "'%s%s'|format(ns.s, ns.s)"),
    "doubling by %": DOUBLING.replace("= %s %}", "= '%s%s' % (ns.s, ns.s) %}"),
    "doubling by capture": "{% set ns=namespace(s='a') %}{% for i in range(60) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
    "doubling by macro": "{% macro m(s) %}{{ s }}{{ s }}{% endmacro %}" + DOUBLING.replace("%s", "m(ns.s)"),
    "doubling by the filter block": "{% set ns=namespace(s='a') %}{% for i in range(60) %}{% set ns.s %}{% filter upper %}{{ ns.s }}{{ ns.s }}{% endfilter %}{% endset %}{% endfor %}",
    "doubling lists": "{% set ns=namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "a tower printed": TOWERS + "{{ ns.a }}",
    "a tower as json": TOWERS + "{{ ns.a|tojson }}",
    "a tower as string": TOWERS + "{{ ns.a|string }}",
    "two towers compared": TOWERS + "{{ ns.a == ns.b }}",
    "a tower of dicts": "{% set ns=namespace(a={}) %}{% for i in range(60) %}{% set ns.a = dict(x=ns.a, y=ns.a) %}{% endfor %}{{ ns.a }}",
    "a tower of tuples": "{% set ns=namespace(a=()) %}{% for i in range(60) %}{% set ns.a = (ns.a, ns.a) %}{% endfor %}{{ ns.a }}",
    "a tower of namespaces": "{% set ns=namespace(a=1) %}{% for i in range(60) %}{% set ns.a = namespace(x=ns.a, y=ns.a) %}{% endfor %}{{ ns.a }}",
    "wide center": "{{ 'a'.center(10**9) }}",
    "wide ljust": "{{ 'a'.ljust(10**9) }}",
    "wide zfill": "{{ 'a'.zfill(10**9) }}",
    "wide format": "{{ '{:>1000000000}'.format(1) }}",
    "computed format": "{{ '{:{w}}'.format(1, w=10**9) }}",
    "wide %": "{{ '%1000000000d' % 1 }}",
    "computed %": "{{ '%*d' % (10**9, 1) }}",
    "wide format filter": "{{ '%1000000000d'|format(1) }}",
    "wide indent": "{{ ('x\n' * 100000)|indent(100000) }}",
    "many indents": "{{ ('x\n' * 1000000)|indent(900) }}",
    "wide json": "{{ [[[[1]]]]|tojson(indent=1000000000) }}",
    "rounding": "{{ 5|round(-1000000000) }}",
    "rounding up": "{{ 5|round(1000000000, 'ceil') }}",
    "slices": "{{ [1]|slice(1000000000)|list }}",
    "bytes of a number": "{{ (5).to_bytes(10**9, 'big') }}",
    "expandtabs": "{{ '\t'.expandtabs(10**9) }}",
    "markup center": "{{ ('x'|e).center(3000000000)|length }}",
    "markup ljust": "{{ ('x'|e).ljust(3000000000)|length }}",
    "markup rjust": "{{ ('x'|safe).rjust(3000000000)|length }}",
    "markup zfill": "{{ ('x'|e).zfill(3000000000)|length }}",
    "markup expandtabs": "{{ ('\t'|e).expandtabs(3000000000)|length }}",
    "markup replace": "{{ (('x' * 100000)|e).replace('x', 'y' * 100000)|length }}",
    "markup join": "{{ (('x' * 1000000)|e).join(['a'] * 10000)|length }}",
    "markup format": "{{ ('{:>2000000000}'|e).format('x')|length }}",
    "markup repetition": "{{ (('x'|e) * 3000000000)|length }}",
    "translate": "{{ ('x' * 1000000).translate({120: 'y' * 10000})|length }}",
    "encode": "{{ ('x' * 300000000).encode('utf-32')|length }}",
    "pretty printing": "{{ ([[1] * 10000] * 100000)|pprint|length }}",
    "word wrap": "{{ ('x ' * 1000000)|wordwrap(1, true, 'y' * 100000)|length }}",
    "lorem ipsum": "{{ lipsum(1000000) }}",
    "sum of lists": "{{ ([[1] * 10000] * 10000)|sum(start=[])|length }}",
    "joined copies": "{{ (['a' * 1000000] * 1000000)|join }}",
    "joined copies by method": "{{ 'x'.join(['a' * 1000000] * 10000) }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "exponential macro": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for x in range(50) recursive %}{{ loop(range(50)) }}{% endfor %}",
    "kept slices": "{% set ns=namespace(l=[], s='a'*1000000) %}{% for i in range(99999) %}{% set ns.l = [ns.l, ns.s[1:]] %}{% endfor %}",
    "kept splits": "{% set ns=namespace(l=[], s='a '*500000) %}{% for i in range(99999) %}{% set ns.l = [ns.l, ns.s.split()] %}{% endfor %}",
    "mapped filters": "{{ range(99999)|map('string')|map('replace', '1', 'x'*10000)|join|length }}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "classes by item": "{{ ''['__class__'] }}",
    "classes by filter": "{{ (''|attr('__class__'))|string }}",
    "classes by map": "{{ ['']|map(attribute='__class__')|first }}",
    "classes by format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "classes by format_map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "format through map": "{{ ['{0.__class__}']|map('format', 1)|list }}{{ messages.append(1) }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "code of a macro": "{% macro f() %}{% endmacro %}{{ f._func.__code__ }}",
    "changed messages": "{{ messages.append(1) }}",
    "changed keys": "{{ messages[0].update({}) }}",
    "files": "{% include '/etc/passwd' %}",
    "imports": "{% import 'os' as os %}{{ os }}",
    "the environment": "{{ self._TemplateReference__context.environment }}",
}


@pytest.fixture
def little_memory() -> Iterator[None]:
    """At most 300 MiB more than now; beyond that, Python gets a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (300 << 20), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.few(12)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the memory limit needs Linux")
@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_with_one_sentence(name: str) -> None:
    with pytest.raises(BankfullError) as caught:
        ChatTemplate(HOSTILE[name]).render([{"role": "user", "content": "x"}])
    message = str(caught.value)
    assert "chat template" in message and "\n" not in message and len(message) < 700
    assert "MemoryError" not in message


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'x'.center(5) }}|{{ 'ab'|indent(2, true) }}|{{ '%s-%d' % ('a', 3) }}", "  x  |  ab|a-3"),
        ("{{ '{}:{a}'.format(1, a='b') }}|{{ 3 * 'ab' }}|{{ 2 ** 10 }}|{{ 7 % 3 }}", "1:b|ababab|1024|1"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "a1"),
        (
            "{% for x in [1, 2, 3] %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}",
            "1/3,2/3,3/3",
        ),
        ("{% for x in range(9) if x % 2 %}{% if x > 5 %}{% break %}{% endif %}{{ x }}{% endfor %}", "135"),
        ("{{ [3, 1, 2]|sort|join(', ') }} {{ [1, 2]|sum }} {{ ['b', 'a']|map('upper')|list }}", "1, 2, 3 3 ['B', 'A']"),
        (
            "{{ none }} {{ true }} {{ 1.5 }} {{ missing }} {{ [1, 'a', {'b': none}] }}",
            "None True 1.5  [1, 'a', {'b': None}]",
        ),
    ],
)
def test_an_honest_template_is_not_disturbed(source: str, text: str) -> None:
    assert ChatTemplate(source).render([{"role": "user", "content": "x"}]) == text


def test_a_long_conversation_is_not_a_hostile_one() -> None:
    source = (
        "{% for m in messages %}{% if messages[loop.index0:]|length > 0 %}{{ '<' + m.role + '>' + m.content|trim + '\n' }}"
        "{% endif %}{% endfor %}"
    )
    long = [{"role": "user", "content": " word" * 40_000} for _ in range(20)]
    many = [{"role": "user", "content": "word"} for _ in range(1000)]
    assert len(ChatTemplate(source).render(long)) > 20 * 5 * 39_999
    assert ChatTemplate(source).render(many).count("\n") == 1000


# -- the process in which they run

MESSAGES = [{"role": "user", "content": "x"}]


@pytest.fixture
def process() -> Iterator[RenderProcess]:
    made = RenderProcess()
    yield made
    made.close()


def test_one_process_serves_call_after_call(process: RenderProcess) -> None:
    sources = [Source(f"{number}{{{{ x }}}}") for number in range(2 * render_process.TEMPLATES)]
    for _ in range(2):
        assert [process.render(source, {"x": "!"}, 1) for source in sources] == [
            f"{number}!" for number in range(len(sources))
        ]
    assert process.starts == 1 and len(process._known) == render_process.TEMPLATES


@pytest.mark.parametrize("name", ["nested loops", "string multiplication"])
def test_a_process_that_passed_its_limits_is_followed_by_another(process: RenderProcess, name: str) -> None:
    with pytest.raises(RequestError, match=r"more than (1 second|512 MiB of memory)"):
        process.render(Source(HOSTILE[name]), {"messages": MESSAGES}, 5)
    assert process.render(Source("{{ x }}"), {"x": "fine"}, 4) == "fine" and process.starts == 2


def test_a_process_that_was_killed_is_followed_by_another(process: RenderProcess) -> None:
    source = Source("{{ x }}")
    for number in range(1, 4):
        assert process.render(source, {"x": "fine"}, 4) == "fine" and process.starts == number
        assert process.at_once(source) and process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        assert process._process is not None
        process._process.wait()
        assert not process.at_once(source)


def test_an_interrupted_call_leaves_no_answer_to_the_next_one(
    process: RenderProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source("{{ x }}")
    assert process.render(source, {"x": "first"}, 5) == "first"
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(process, "_await", lambda most: (_ for _ in ()).throw(KeyboardInterrupt))
        process.render(source, {"x": "second"}, 6)
    assert process.render(source, {"x": "third"}, 5) == "third"


def test_a_process_that_never_starts_is_one_sentence(process: RenderProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_process.sys, "executable", "/bin/false")
    with pytest.raises(BankfullError, match="ends right after its start"):
        process.render(Source("x"), {}, 0)
    assert process.starts == 2


def test_where_the_system_limits_no_memory_the_owner_does(
    process: RenderProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []

    def resident(pid: int) -> int:
        looked.append(pid)
        return render_process.MEMORY + 1

    monkeypatch.setattr(render_process, "_resident", resident)
    source = Source("{{ x }}{% if x == 'y' %}" + HOSTILE["nested loops"] + "{% endif %}")
    assert process.render(source, {"x": "x"}, 1) == "x"
    process._limited = False
    with pytest.raises(RequestError, match="MiB"):
        process.render(source, {"x": "y"}, 1)
    assert looked and process.starts == 2


def test_the_memory_of_a_process_is_known_by_the_means_of_any_unix() -> None:
    assert render_process._resident(os.getpid()) > 1 << 20
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert render_process._resident(gone.pid) == 0


def test_the_process_inherits_no_keys(process: RenderProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANKFULL_API_KEY", "k" * 32)
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    process.render(Source("x"), {}, 0)
    found = Path(f"/proc/{process.pid}/environ")
    if not found.exists():
        pytest.skip("what a process inherited is only shown on Linux")
    assert b"kkkk" not in found.read_bytes() and b"LC_ALL" in found.read_bytes()


def test_a_forked_process_does_not_speak_on_its_parents_socket() -> None:
    assert ChatTemplate("{{ messages[0].content }}").render(MESSAGES) == "x"
    ours = short_calls.pid
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = ChatTemplate("child {{ messages[0].content }}").render(MESSAGES)
            os.write(write, f"{text} {short_calls.pid == ours}".encode())
            short_calls.close()
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        assert told.read() == "child x False"
    os.waitpid(child, 0)
    assert ChatTemplate("{{ messages[0].content }}!").render(MESSAGES) == "x!" and short_calls.pid == ours


def test_values_that_only_python_has_come_through(process: RenderProcess) -> None:
    values = {"a": "\ud800", "b": 10**30, "c": float("nan"), "d": {"\u00e9": [None, True]}}
    made = process.render(Source("{{ a }}|{{ b }}|{{ c }}|{{ d }}"), values, 10)
    assert made == "\ud800|1" + "0" * 30 + "|nan|{'\u00e9': [None, True]}"
    with pytest.raises(RequestError, match="cannot be encoded as JSON"):
        process.render(Source("{{ a }}"), {"a": 10**5000}, 1)
