/* A verdict as JUnit XML, so that a CI shows each gradient and the shapes as test cases. */
#ifndef KA_JUNIT_H
#define KA_JUNIT_H

#include <jansson.h>

#include "core/base.h"

/* `result`: the result object. Errors as ka_file_write(). */
int ka_junit_write(const char *path, const char *checked_file, const json_t *result, struct ka_err *err);

#endif
