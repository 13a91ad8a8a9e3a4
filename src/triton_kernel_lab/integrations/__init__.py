"""The kernels inside other people's models; each module here needs the library it is named after."""
