# Installs headers, archive and a CMake package: find_package(imbrex), target imbrex::imbrex.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/imbrex)
install(TARGETS imbrex EXPORT imbrex_targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library)
install(DIRECTORY include/imbrex DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT library)
install(EXPORT imbrex_targets NAMESPACE imbrex:: DESTINATION ${package_dir} COMPONENT library)
configure_package_config_file(cmake/imbrex-config.cmake.in imbrex-config.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(imbrex-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/imbrex-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/imbrex-config-version.cmake
  DESTINATION ${package_dir} COMPONENT library)
