import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from shoal import Arrays, Component, Context, Parameters, make_image_reader


class Image(Component):
    """Decode pictures, resize and crop them, and normalise their colours, in the order of torchvision's transforms."""

    library = "numpy"

    def setup(self, context: Context) -> None:
        parameters = Parameters(context.spec)
        self.image, self.pixels = parameters.tensors("STRING[1] -> FP32[3,h,w]")
        self.read = make_image_reader(context, parameters, edge=self.image)

    def run(self, batch: Arrays) -> Arrays:
        return {self.pixels: self.read(batch[self.image][:, 0])}


TritonPythonModel = Image.for_triton()
