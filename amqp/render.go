package inboxamqp

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"
)

// text returns strings and byte strings as they are; some clients send every string as the latter.
func text(value any) (string, bool) {
	switch v := value.(type) {
	case string:
		return v, true
	case []byte:
		return string(v), true
	}
	return "", false
}

// render writes a header value as text: the same value always gives the same text.
func render(value any) string {
	if s, ok := text(value); ok {
		return s
	}
	switch v := value.(type) {
	case nil:
		return ""
	case float32:
		return strconv.FormatFloat(float64(v), 'g', -1, 32)
	case float64:
		return strconv.FormatFloat(v, 'g', -1, 64)
	case time.Time:
		return v.UTC().Format(time.RFC3339)
	case amqp091.Decimal:
		return decimal(v)
	case amqp091.Table, []any:
		return renderJSON(v)
	default: // booleans, integers
		return fmt.Sprint(v)
	}
}

func renderJSON(value any) string {
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(jsonValue(value)); err != nil {
		return fmt.Sprint(value) // cannot happen: jsonValue leaves only types that JSON has
	}
	return strings.TrimSuffix(out.String(), "\n")
}

// jsonValue replaces what encoding/json refuses or would write in another way than render.
func jsonValue(value any) any {
	switch v := value.(type) {
	case nil, bool, string, int8, int16, int32, int64, int, uint8:
		return v
	case float32:
		if f := float64(v); math.IsNaN(f) || math.IsInf(f, 0) {
			return render(v)
		}
		return v
	case float64:
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return render(v)
		}
		return v
	case amqp091.Decimal:
		return json.Number(decimal(v))
	case amqp091.Table:
		table := make(map[string]any, len(v))
		for key, field := range v {
			table[key] = jsonValue(field)
		}
		return table
	case []any:
		list := make([]any, len(v))
		for i, field := range v {
			list[i] = jsonValue(field)
		}
		return list
	default:
		return render(v)
	}
}

// decimal writes Value divided by ten to the power of Scale.
func decimal(d amqp091.Decimal) string {
	if d.Scale == 0 {
		return strconv.Itoa(int(d.Value))
	}
	sign, digits := "", strconv.FormatInt(int64(d.Value), 10)
	if digits[0] == '-' {
		sign, digits = "-", digits[1:]
	}
	scale := int(d.Scale)
	if missing := scale + 1 - len(digits); missing > 0 {
		digits = strings.Repeat("0", missing) + digits
	}
	point := len(digits) - scale
	return sign + digits[:point] + "." + digits[point:]
}
