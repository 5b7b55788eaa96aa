"""From what a user typed to parameters on a device.

``resolve`` finds or fetches the model, ``checkpoint`` opens it and says what it is, a ``source`` (safetensors, GGUF, Orbax) names its tensors and
``assemble`` fills each device's part of the parameters from them; ``orbax_format`` stores assembled parameters. Only loading weights imports jax.
"""
