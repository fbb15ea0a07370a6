"""The artifact folder: manifest, codec, loading."""
