package amqp_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"

	inbox "github.com/devmappa/watermill-inbox"
)

// Messages without Watermill's header: each is handled under an id of its own or refused, and none is ever taken
// for a copy of another.
func TestForeignMessagesNeverMeetOnOneID(t *testing.T) {
	t.Parallel()
	publishings := []amqp091.Publishing{
		{Body: []byte("A")},
		{Body: []byte("B"), MessageId: "b"},
		{Body: []byte("copy of B"), MessageId: "b"},
		{Body: []byte("empty header"), Headers: amqp091.Table{uuidHeader: ""}},
		{Body: []byte("Z")},
	}
	for name, tc := range map[string]struct {
		marshaler amqp.Marshaler
		handled   []string
		poisoned  []string
	}{
		"ours": {nil, []string{"b"}, []string{"A", "empty header", "Z"}},
		// Pinned: message-id is not read, so an id of one's own does not help. Still nobody is a duplicate.
		"default": {amqp.DefaultMarshaler{}, nil, []string{"A", "B", "copy of B", "empty header", "Z"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newService(t, nil)
			s.db.SetMaxOpenConns(1)
			s.publishAll(s.queue, publishings)
			i := s.start(setup{handler: s.write, configure: func(c *amqp.Config) {
				if tc.marshaler != nil {
					c.Marshaler = tc.marshaler
				}
			}})
			i.wait(len(publishings))
			i.finish()

			for _, d := range s.wantPoisoned(tc.poisoned...) {
				wantReason(t, d, "message id is empty")
			}
			s.wantEffects(tc.handled...)
			i.wantLines("processed", len(tc.handled))
			i.wantLines("duplicate", len(tc.handled))
			i.wantAttempts(len(publishings)) // a permanent error is not retried
			for _, err := range i.attempts {
				if err != nil && (!errors.Is(err, inbox.ErrInvalidKey) || !inbox.ShouldPoison(err)) {
					t.Errorf("not typed as permanent: %v", err)
				}
			}
			s.wantNoOpenTransaction(s.application)
		})
	}
}

// Ids that PostgreSQL cannot store are refused before it is asked.
func TestUnstorableID(t *testing.T) {
	t.Parallel()
	s := newService(t, nil)
	s.db.SetMaxOpenConns(1)
	bad := map[string]string{"NUL": "a\x00b", "not UTF-8": "\xff\xfe", "lone surrogate": "\xed\xa0\x80"}
	order := []string{"NUL", "not UTF-8", "lone surrogate"}
	for _, name := range order {
		s.publish(s.queue, amqp091.Publishing{Headers: amqp091.Table{uuidHeader: bad[name]}, Body: []byte(name)})
	}
	s.publish(s.queue, amqp091.Publishing{MessageId: "good"})

	i := s.start(setup{handler: s.write})
	i.wait(4)
	i.finish()
	for _, d := range s.wantPoisoned(order...) {
		wantReason(t, d, "invalid key: message id")
		if got := d.Headers[uuidHeader]; got != bad[string(d.Body)] {
			t.Errorf("%s arrives in the poison queue with the id %q", d.Body, got)
		}
	}
	s.wantEffects("good")
	i.wantAttempts(4)
	s.wantNoOpenTransaction(s.application)
}

func TestUnstorableHandlerName(t *testing.T) {
	t.Parallel()
	for i, name := range []string{"a\x00b", "\xff\xfe", "\xed\xa0\x80", strings.Repeat("n", 256)} {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			s := newService(t, nil)
			s.publish(s.queue, amqp091.Publishing{MessageId: "m", Body: []byte("body")})
			bad := s.start(setup{name: name, handler: s.write})
			bad.wait(1)
			bad.finish()
			d := s.wantPoisoned("body")[0]
			wantReason(t, d, "invalid key: consumer")
			s.wantEffects()

			// Moved back once the name is mended, it is handled.
			s.publish(s.queue, amqp091.Publishing{Headers: d.Headers, MessageId: d.MessageId, Body: d.Body})
			good := s.start(setup{handler: s.write})
			good.wait(1)
			good.finish()
			s.wantEffects("m")
		})
	}
}

func TestLongID(t *testing.T) {
	t.Parallel()
	s := newService(t, nil)
	publisher := s.publisher(s.config(nil))
	longest := strings.Repeat("é", 127) + "x"
	for _, id := range []string{longest, longest + "y", strings.Repeat("z", 300), longest, longest[:254] + "X"} {
		if err := publisher.Publish(s.queue, message.NewMessage(id, []byte(fmt.Sprint(len(id))))); err != nil {
			t.Fatal(err)
		}
	}
	messageID := strings.Repeat("m", 255)
	s.publish(s.queue, amqp091.Publishing{MessageId: messageID})

	i := s.start(setup{handler: s.write})
	i.wait(6)
	i.finish()
	for _, d := range s.wantPoisoned("256", "300") {
		wantReason(t, d, fmt.Sprintf("message id has %s bytes, at most 255 are allowed", d.Body))
	}
	s.wantEffects(longest, longest[:254]+"X", messageID)
	i.wantLines("duplicate", 1)
	i.wantAttempts(6)
}
