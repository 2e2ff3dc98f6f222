#!/usr/bin/env python3
"""Makes cli/tests/data/pictures.json: small files of pictures, and the pixels that the models' authors' code reads from
them: Pillow's, turned as EXIF data say, and laid over white where they are not opaque.

    pip install pillow==11.3.0 numpy
    python tests/reference_pictures.py
"""

import io
import json
import pathlib
import struct
import zlib

import numpy as np
from PIL import Image, ImageOps

OUT = pathlib.Path(__file__).parent.parent / "cli" / "tests" / "data" / "pictures.json"


def values(*shape):
    """Of every size, the same in every run."""
    n = int(np.prod(shape))
    return (np.arange(n, dtype=np.int64) * 7919 % 65536).reshape(shape)


def png(width, height, depth, colour, rows, extra=b""):
    """A PNG of raw rows."""
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + row for row in rows), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + extra + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def saved(image, kind, **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def deep(colour, channels):
    """A PNG of 16 bits."""
    rows = values(3, 4, channels).astype(">u2")
    return png(4, 3, 16, colour, [row.tobytes() for row in rows])


def blocks():
    """Three colours in areas that lossy files keep."""
    image = Image.new("RGB", (24, 16), (200, 30, 30))
    image.paste((30, 180, 40), (0, 0, 8, 8))
    image.paste((40, 50, 210), (16, 8, 24, 16))
    return image


def files():
    def bytes_of(*shape):
        return (values(*shape) % 256).astype(np.uint8)
    rgb, rgba = Image.fromarray(bytes_of(3, 4, 3)), Image.fromarray(bytes_of(3, 4, 4))
    yield "rgb.png", saved(rgb, "PNG"), 0
    yield "rgba.png", saved(rgba, "PNG"), 0
    yield "grey.png", saved(rgb.convert("L"), "PNG"), 0
    yield "grey-alpha.png", saved(Image.merge("LA", [rgba.getchannel(1), rgba.getchannel(3)]), "PNG"), 0
    yield "bits.png", saved(rgb.convert("1"), "PNG"), 0
    yield "palette.png", saved(rgb.quantize(4), "PNG"), 0
    yield "palette-clear.png", saved(rgb.quantize(4), "PNG", transparency=bytes([255, 128, 0, 7])), 0
    yield "rgb16.png", deep(2, 3), 0
    yield "rgba16.png", deep(6, 4), 0
    yield "grey16.png", deep(0, 1), 0
    yield "grey16-alpha.png", deep(4, 2), 0
    yield "rgba.webp", saved(rgba, "WEBP", lossless=True, exact=True), 0
    yield "rgb.webp", saved(rgb, "WEBP", lossless=True), 0
    yield "rgb.bmp", saved(rgb, "BMP"), 0
    yield "rgb.gif", saved(rgb.quantize(8), "GIF"), 0
    yield "clear.gif", saved(rgb.quantize(4), "GIF", transparency=1), 0
    frames = [Image.new("RGB", (5, 4), colour) for colour in [(250, 0, 0), (0, 250, 0), (0, 0, 250)]]
    for kind in ["GIF", "WEBP", "PNG"]:
        more = {"lossless": True} if kind == "WEBP" else {}
        data = saved(frames[0], kind, save_all=True, append_images=frames[1:], duration=90, **more)
        yield f"animated.{kind.lower()}", data, 0
    jpeg = {"quality": 100, "subsampling": 0}
    yield "cmyk.jpg", saved(blocks().convert("CMYK"), "JPEG", **jpeg), 3
    yield "grey.jpg", saved(blocks().convert("L"), "JPEG", **jpeg), 3
    yield "thin.png", saved(Image.fromarray(bytes_of(300, 1, 3)), "PNG"), 0
    for turn in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = turn
        yield f"turned{turn}.jpg", saved(blocks(), "JPEG", exif=exif, **jpeg), 3
    exif = Image.Exif()
    exif[0x0112] = 6
    yield "turned.png", saved(blocks(), "PNG", exif=exif), 0
    yield "turned.webp", saved(blocks(), "WEBP", exif=exif, lossless=True), 0


def read(data):
    """As transformers 5.24 does: `load_image`, `convert_to_rgb`."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if image.mode == "I;16":
        # Pillow saturates what is above 255: a picture would be white. Colours of 16 bits are their high bytes.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode == "RGB":
        return image
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def main():
    lines = []
    for name, data, tolerance in files():
        image = read(data)
        entry = {"name": name, "file": data.hex(), "width": image.width, "height": image.height,
                 "rgb": image.tobytes().hex(), "tolerance": tolerance}
        lines.append(json.dumps(entry))
    OUT.write_text("[" + ",\n".join(lines) + "]\n")


main()
