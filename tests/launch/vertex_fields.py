"""`python vertex_fields.py < SPEC`, in an environment with google-cloud-aiplatform: says what a spec in JSON is.

Ends with a traceback where it has a field or a value that Vertex AI's protocol does not have.
"""

from __future__ import annotations

import json
import sys

from google.cloud.aiplatform_v1.types import CustomJobSpec, HyperparameterTuningJob
from google.protobuf import json_format

for line in sys.stdin:
    spec = json.loads(line)
    kind = HyperparameterTuningJob if "studySpec" in spec else CustomJobSpec
    json_format.ParseDict(spec, kind.pb()())
    print(kind.__name__)
