"""`bankfull serve` with a tiny model whose template supports tools. It runs in the main environment, because the
clients' environment has no bankfull."""

from __future__ import annotations

import sys

from bankfull.cli import main
from tests.tiny import speaking_folder

TOOLS = (
    '{% if tools %}<|im_start|>system\nCall with <tool_call>{"name": ..., "arguments": ...}</tool_call>: '
    "{% for tool in tools %}{{ tool['function']['name'] }} {% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

folder = speaking_folder()
(folder / "chat_template.jinja").write_text(TOOLS)
print(f"model folder {folder}", flush=True)
options = ["--port", "0", "--served-model-name", "tiny", "--dtype", "float32", "--memory", "4MiB", "--page-tokens", "4"]
sys.argv = ["bankfull", "serve", str(folder), *options, "--rows", "8"]
sys.exit(main())
