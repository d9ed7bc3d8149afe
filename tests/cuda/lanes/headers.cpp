// The compiled headers of all libraries of kernel texts belong to this file; see CMakeLists.txt.
