"""What the model card of a saved adapter says besides what PEFT writes."""

import re
from pathlib import Path

from huggingface_hub import ModelCard

NOTE = """\
This adapter is a [preproj](https://arxiv.org/abs/2604.10791) adapter. Import `preproj` before PEFT opens it:

```python
import preproj
from peft import PeftModel

model = PeftModel.from_pretrained(base_model, "this-adapter")
```"""


def complete_card(card_file: Path) -> None:
    """Tag PEFT's model card with ``preproj`` and say below its title how to load the adapter, once for all saves.

    Args:
        card_file: a README.md; one that is not a card of PEFT's is left alone.
    """
    card = ModelCard.load(card_file)
    if card.data.get("library_name") != "peft":
        return
    card.data.tags = sorted({*(card.data.tags or []), "preproj"})
    if "import preproj" not in card.text:
        card.text = re.sub(r"\A\s*(# .*\n)?", lambda title: f"{title[0]}\n{NOTE}\n", card.text, count=1)
    card.save(card_file)
