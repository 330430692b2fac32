package amqp_test

import (
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"

	inboxamqp "github.com/devmappa/watermill-inbox/amqp"
)

// A phantom is a message without id, metadata and body that nobody has published.
func isPhantom(msg *message.Message) bool {
	return msg.UUID == "" && len(msg.Metadata) == 0 && len(msg.Payload) == 0
}

// consumePhantoms passes real messages on and counts phantoms.
func consumePhantoms(b *broker, config amqp.Config, logger watermill.LoggerAdapter, queue string) (<-chan string, *atomic.Int32) {
	b.Helper()
	messages, phantoms := make(chan string, 1000), new(atomic.Int32)
	startRouter(b, watermill.NopLogger{}, func(router *message.Router) {
		router.AddConsumerHandler("handler", queue, b.subscriber(config, logger), func(msg *message.Message) error {
			if isPhantom(msg) {
				phantoms.Add(1)
				return nil
			}
			messages <- string(msg.Payload)
			return nil
		})
	})
	return messages, phantoms
}

// When a queue is deleted the broker ends its consumers but not their channel, so the subscriber surely
// reads from the closed Go channel.
func TestDeletedQueueGivesNoPhantom(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		marshaler amqp.Marshaler
		phantom   bool
	}{
		"ours":    {inboxamqp.Marshaler{}, false},
		"default": {amqp.DefaultMarshaler{}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBroker(t)
			queue := b.name("queue")
			config := b.config(nil)
			config.Marshaler = tc.marshaler
			nacks := newErrorLog("Cannot nack message: delivery not initialized")
			messages, phantoms := consumePhantoms(b, config, nacks, queue)

			const rounds = 3
			for i := range rounds {
				b.publish(queue, amqp091.Publishing{Body: []byte("before")})
				await(t, messages, "the message before")
				b.must(func(c *amqp091.Channel) error { _, err := c.QueueDelete(queue, false, false, false); return err })
				await(t, nacks.lines, "the subscriber to notice")
				b.waitForQueue(queue) // the subscriber declares it again
				b.publish(queue, amqp091.Publishing{Body: []byte("after")})
				await(t, messages, fmt.Sprintf("the message after round %d", i+1))
			}
			want := int32(0)
			if tc.phantom {
				want = rounds
			}
			if got := phantoms.Load(); got != want {
				t.Errorf("%d phantoms reached the handler in %d rounds, want %d", got, rounds, want)
			}
		})
	}
}
