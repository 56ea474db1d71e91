"""SmolVLA: a small vision-language model whose keys and values an action expert attends to."""
