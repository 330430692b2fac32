package inboxamqp_test

import (
	"errors"
	"maps"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"

	inboxamqp "github.com/devmappa/watermill-inbox/amqp"
)

const uuidHeader = amqp.DefaultMessageUUIDHeaderKey

// acker makes a delivery look like one that came from a channel.
type acker struct{}

func (acker) Ack(uint64, bool) error        { return nil }
func (acker) Nack(uint64, bool, bool) error { return nil }
func (acker) Reject(uint64, bool) error     { return nil }

// deliver does what a broker does with a publishing, as far as a marshaler can see it.
func deliver(publishing amqp091.Publishing) amqp091.Delivery {
	return amqp091.Delivery{
		Acknowledger: acker{},
		DeliveryTag:  1,
		Headers:      publishing.Headers,
		MessageId:    publishing.MessageId,
		Body:         publishing.Body,
	}
}

func unmarshal(t testing.TB, marshaler amqp.Marshaler, delivery amqp091.Delivery) *message.Message {
	t.Helper()
	msg, err := marshaler.Unmarshal(delivery)
	if err != nil {
		t.Fatalf("Unmarshal: %v", err)
	}
	return msg
}

func TestUnmarshalUUID(t *testing.T) {
	t.Parallel()

	for name, tc := range map[string]struct {
		headers   amqp091.Table
		messageID string
		want      string
		kept      string // what stays in the metadata under the header's name
	}{
		"header":                          {headers: amqp091.Table{uuidHeader: "h"}, want: "h"},
		"header before message-id":        {headers: amqp091.Table{uuidHeader: "h"}, messageID: "m", want: "h"},
		"message-id":                      {messageID: "m", want: "m"},
		"neither":                         {want: ""},
		"empty header":                    {headers: amqp091.Table{uuidHeader: ""}, messageID: "m", want: "m"},
		"empty header only":               {headers: amqp091.Table{uuidHeader: ""}, want: ""},
		"byte string":                     {headers: amqp091.Table{uuidHeader: []byte("h\x00\xff")}, messageID: "m", want: "h\x00\xff"},
		"empty byte string":               {headers: amqp091.Table{uuidHeader: []byte{}}, messageID: "m", want: "m"},
		"arbitrary bytes":                 {headers: amqp091.Table{uuidHeader: "a\x00b\xff\xfe\xed\xa0\x80"}, want: "a\x00b\xff\xfe\xed\xa0\x80"},
		"arbitrary bytes in message-id":   {messageID: "a\x00b\xff", want: "a\x00b\xff"},
		"long header":                     {headers: amqp091.Table{uuidHeader: strings.Repeat("x", 70000)}, want: strings.Repeat("x", 70000)},
		"integer is no identity":          {headers: amqp091.Table{uuidHeader: int64(42)}, messageID: "m", want: "m", kept: "42"},
		"integer only":                    {headers: amqp091.Table{uuidHeader: int32(42)}, want: "", kept: "42"},
		"boolean is no identity":          {headers: amqp091.Table{uuidHeader: true}, want: "", kept: "true"},
		"float is no identity":            {headers: amqp091.Table{uuidHeader: 1.5}, messageID: "m", want: "m", kept: "1.5"},
		"nil is no identity":              {headers: amqp091.Table{uuidHeader: nil}, messageID: "m", want: "m"},
		"list is no identity":             {headers: amqp091.Table{uuidHeader: []any{"a"}}, messageID: "m", want: "m", kept: `["a"]`},
		"other headers are not consulted": {headers: amqp091.Table{"message-id": "x", "id": "y"}, want: ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			msg := unmarshal(t, inboxamqp.Marshaler{}, deliver(amqp091.Publishing{Headers: tc.headers, MessageId: tc.messageID}))
			if msg.UUID != tc.want {
				t.Errorf("UUID %q, want %q", msg.UUID, tc.want)
			}
			if got := msg.Metadata.Get(uuidHeader); got != tc.kept {
				t.Errorf("metadata %s: %q, want %q", uuidHeader, got, tc.kept)
			}
		})
	}
}

func TestUnmarshalUUIDFromNamedHeader(t *testing.T) {
	t.Parallel()
	msg := unmarshal(t, inboxamqp.Marshaler{MessageUUIDHeaderKey: "event-id"}, deliver(amqp091.Publishing{
		Headers:   amqp091.Table{"event-id": "e", uuidHeader: "h"},
		MessageId: "m",
	}))
	if msg.UUID != "e" {
		t.Errorf("UUID %q, want that of the named header", msg.UUID)
	}
	if want := (message.Metadata{uuidHeader: "h"}); !maps.Equal(msg.Metadata, want) {
		t.Errorf("metadata %q, want %q", msg.Metadata, want)
	}
}

func TestUnmarshalHeaders(t *testing.T) {
	t.Parallel()

	deep := any("bottom")
	for range 2000 {
		deep = []any{deep}
	}

	for name, tc := range map[string]struct {
		value any
		want  string
	}{
		"string":             {"a<b>\x00\xff", "a<b>\x00\xff"},
		"byte string":        {[]byte("a<b>\x00\xff"), "a<b>\x00\xff"},
		"nil":                {nil, ""},
		"true":               {true, "true"},
		"uint8":              {uint8(255), "255"},
		"int8":               {int8(-128), "-128"},
		"int16":              {int16(-2), "-2"},
		"int32":              {int32(math.MinInt32), "-2147483648"},
		"int64":              {int64(math.MaxInt64), "9223372036854775807"},
		"float32":            {float32(0.1), "0.1"},
		"float64":            {1e100, "1e+100"},
		"NaN":                {math.NaN(), "NaN"},
		"infinite":           {math.Inf(-1), "-Inf"},
		"decimal":            {amqp091.Decimal{Scale: 2, Value: 12345}, "123.45"},
		"decimal, scale 0":   {amqp091.Decimal{Value: -7}, "-7"},
		"decimal, small":     {amqp091.Decimal{Scale: 4, Value: -5}, "-0.0005"},
		"decimal, scale 255": {amqp091.Decimal{Scale: 255, Value: 1}, "0." + strings.Repeat("0", 254) + "1"},
		"time":               {time.Unix(1, 0).In(time.FixedZone("x", 3600)), "1970-01-01T00:00:01Z"},
		"time, far":          {time.Unix(1<<40, 0), "36812-02-20T00:36:16Z"},
		"empty list":         {[]any(nil), "[]"},
		"empty table":        {amqp091.Table{}, "{}"},
		"list":               {[]any{"<a>", int64(1), nil, true, []byte("b"), []any{}}, `["<a>",1,null,true,"b",[]]`},
		"table, sorted keys": {amqp091.Table{"b": int32(2), "a": amqp091.Table{"d": 0.5, "c": float32(0.1)}}, `{"a":{"c":0.1,"d":0.5},"b":2}`},
		"what JSON lacks": {
			[]any{math.NaN(), math.Inf(1), float32(math.Inf(-1)), time.Unix(0, 0), amqp091.Decimal{Scale: 1, Value: 15}, time.Unix(1<<40, 0)},
			`["NaN","+Inf","-Inf","1970-01-01T00:00:00Z",1.5,"36812-02-20T00:36:16Z"]`,
		},
		"invalid UTF-8 inside": {[]any{"\xff"}, `["\ufffd"]`},
		"NUL inside":           {[]any{"\x00"}, `["\u0000"]`},
		"deep":                 {deep, strings.Repeat("[", 2000) + `"bottom"` + strings.Repeat("]", 2000)},
		"type AMQP lacks":      {uint16(7), "7"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for range 3 { // maps iterate in random order
				msg := unmarshal(t, inboxamqp.Marshaler{}, deliver(amqp091.Publishing{Headers: amqp091.Table{"key": tc.value}}))
				if got, ok := msg.Metadata["key"]; !ok || got != tc.want {
					t.Fatalf("metadata %q (there: %t), want %q", got, ok, tc.want)
				}
			}
		})
	}
}

func TestUnmarshalRedelivered(t *testing.T) {
	t.Parallel()

	first := deliver(amqp091.Publishing{Headers: amqp091.Table{inboxamqp.RedeliveredKey: "forged", "k": "v"}})
	if got, want := unmarshal(t, inboxamqp.Marshaler{}, first).Metadata, (message.Metadata{"k": "v"}); !maps.Equal(got, want) {
		t.Errorf("first delivery has metadata %q, want %q", got, want)
	}

	second := first
	second.Redelivered = true
	second.Headers = amqp091.Table{inboxamqp.DeliveryCountKey: int64(3), inboxamqp.AcquiredCountKey: int64(4)}
	want := message.Metadata{
		inboxamqp.RedeliveredKey:   "true",
		inboxamqp.DeliveryCountKey: "3",
		inboxamqp.AcquiredCountKey: "4",
	}
	if got := unmarshal(t, inboxamqp.Marshaler{}, second).Metadata; !maps.Equal(got, want) {
		t.Errorf("redelivery has metadata %q, want %q", got, want)
	}
}

func TestUnmarshalRefusesOnlyTheZeroDelivery(t *testing.T) {
	t.Parallel()

	if msg, err := (inboxamqp.Marshaler{}).Unmarshal(amqp091.Delivery{}); !errors.Is(err, inboxamqp.ErrNoDelivery) || msg != nil {
		t.Errorf("zero delivery gives %v, %v", msg, err)
	}
	// The default takes it for a message; if this fails the guard may have become unnecessary.
	if msg, err := (amqp.DefaultMarshaler{}).Unmarshal(amqp091.Delivery{}); err != nil || msg == nil {
		t.Errorf("amqp.DefaultMarshaler now refuses a zero delivery: %v, %v", msg, err)
	}

	for name, delivery := range map[string]amqp091.Delivery{
		"from a channel, all else empty": {Acknowledger: acker{}},
		"no acknowledger, tag":           {DeliveryTag: 1},
		"no acknowledger, body":          {Body: []byte("x")},
		"no acknowledger, message-id":    {MessageId: "m"},
	} {
		if _, err := (inboxamqp.Marshaler{}).Unmarshal(delivery); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestMarshal(t *testing.T) {
	t.Parallel()

	msg := message.NewMessage("id", []byte("body"))
	msg.Metadata = message.Metadata{"k": "v\x00\xff", "": "empty key", uuidHeader: "metadata does not overwrite the UUID"}
	publishing, err := inboxamqp.Marshaler{}.Marshal(msg)
	if err != nil {
		t.Fatal(err)
	}
	if want := (amqp091.Table{"k": "v\x00\xff", "": "empty key", uuidHeader: "id"}); !maps.Equal(publishing.Headers, want) {
		t.Errorf("headers %q, want %q", publishing.Headers, want)
	}
	if publishing.MessageId != "id" || string(publishing.Body) != "body" || publishing.DeliveryMode != amqp091.Persistent {
		t.Errorf("publishing %+v", publishing)
	}

	named, err := inboxamqp.Marshaler{MessageUUIDHeaderKey: "event-id", NotPersistentDeliveryMode: true}.Marshal(msg)
	if err != nil {
		t.Fatal(err)
	}
	if named.Headers["event-id"] != "id" || named.DeliveryMode != 0 {
		t.Errorf("publishing %+v", named)
	}

	processed, err := inboxamqp.Marshaler{PostprocessPublishing: func(p amqp091.Publishing) amqp091.Publishing {
		p.ContentType = "text/plain"
		p.MessageId += "!"
		return p
	}}.Marshal(msg)
	if err != nil {
		t.Fatal(err)
	}
	if processed.ContentType != "text/plain" || processed.MessageId != "id!" {
		t.Errorf("publishing %+v", processed)
	}
}

func TestMarshalMessageIDLength(t *testing.T) {
	t.Parallel()
	for length, want := range map[int]int{0: 0, 1: 1, 255: 255, 256: 0, 300: 0, 70000: 0} {
		id := strings.Repeat("x", length)
		publishing, err := inboxamqp.Marshaler{}.Marshal(message.NewMessage(id, nil))
		if err != nil {
			t.Fatal(err)
		}
		if len(publishing.MessageId) != want {
			t.Errorf("UUID of %d bytes gives a message-id of %d, want %d", length, len(publishing.MessageId), want)
		}
		if publishing.Headers[uuidHeader] != id {
			t.Errorf("UUID of %d bytes is not whole in its header", length)
		}
	}
}

func TestMarshalHeaderNameLength(t *testing.T) {
	t.Parallel()
	for length, refused := range map[int]bool{255: false, 256: true, 300: true, 512: true} {
		msg := message.NewMessage("id", nil)
		msg.Metadata.Set(strings.Repeat("k", length), "v")
		if _, err := (inboxamqp.Marshaler{}).Marshal(msg); errors.Is(err, inboxamqp.ErrHeaderName) != refused {
			t.Errorf("name of %d bytes: error %v, refused must be %t", length, err, refused)
		}
	}
	long := inboxamqp.Marshaler{MessageUUIDHeaderKey: strings.Repeat("k", 256)}
	if _, err := long.Marshal(message.NewMessage("id", nil)); !errors.Is(err, inboxamqp.ErrHeaderName) {
		t.Errorf("UUID header name of 256 bytes: error %v", err)
	}
}

func TestMarshalLeavesOutWhatTheBrokerOwns(t *testing.T) {
	t.Parallel()

	delivery := deliver(amqp091.Publishing{MessageId: "id", Headers: amqp091.Table{
		"x-death":                []any{amqp091.Table{"count": int64(1)}},
		"x-first-death-queue":    "q",
		"x-first-death-reason":   "expired",
		"x-first-death-exchange": "",
		"x-last-death-queue":     "q",
		"x-delivery-count":       int64(2),
		"x-acquired-count":       int64(2),
		"x-received-from":        []any{},
		"x-shovelled":            []any{},
		"x-shovelled-timestamp":  int64(1),
		"x-stream-offset":        int64(1),
		"CC":                     []any{"other"},
		"BCC":                    []any{"other"},
		// The publisher's own, although some begin in the same way.
		"x-tenant": "t", "x-opt-partition-key": "p", "x-delay": int32(5), "cc": "lower case", "x-deathly": "d",
	}})
	delivery.Redelivered = true

	msg := unmarshal(t, inboxamqp.Marshaler{}, delivery)
	if len(msg.Metadata) != len(delivery.Headers)+1 {
		t.Errorf("the handler sees %d of %d", len(msg.Metadata), len(delivery.Headers)+1)
	}
	publishing, err := inboxamqp.Marshaler{}.Marshal(msg)
	if err != nil {
		t.Fatal(err)
	}
	want := amqp091.Table{
		uuidHeader: "id", "x-tenant": "t", "x-opt-partition-key": "p", "x-delay": "5", "cc": "lower case", "x-deathly": "d",
	}
	if !maps.Equal(publishing.Headers, want) {
		t.Errorf("forwarded with %q, want %q", publishing.Headers, want)
	}
}
