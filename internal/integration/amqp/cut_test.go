//go:build !race

// The reconnect of watermill-amqp v2.1.3 has data races of its own (ConnectionWrapper.connected and
// amqpConnection are written without a lock), so the race detector cannot watch a cut connection.

package amqp_test

import (
	"fmt"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	amqp091 "github.com/rabbitmq/amqp091-go"
)

// A cut while messages flow: what is redelivered are messages, and none is lost.
func TestCutConnectionGivesNoPhantom(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	queue := b.name("queue")
	b.declare(queue, nil)
	proxy, uri := newProxy(t)
	config := b.config(nil)
	config.Connection.AmqpURI = uri
	messages, phantoms := consumePhantoms(b, config, watermill.NopLogger{}, queue)

	const rounds, burst = 5, 20
	for round := range rounds {
		missing := map[string]bool{}
		for i := range burst {
			body := fmt.Sprintf("%d-%d", round, i)
			missing[body] = true
			b.publish(queue, amqp091.Publishing{Body: []byte(body)})
		}
		for len(missing) > 0 {
			delete(missing, await(t, messages, fmt.Sprintf("%d messages of round %d", len(missing), round)))
			if len(missing) == burst/2 {
				proxy.cut()
			}
		}
	}
	if got := phantoms.Load(); got != 0 {
		t.Errorf("%d phantoms reached the handler", got)
	}
}
