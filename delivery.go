package inbox

import (
	"context"
	"maps"

	"github.com/ThreeDotsLabs/watermill/message"
)

// delivery is what is the same for all attempts of one delivery, whatever a handler writes into the message.
type delivery struct {
	ctx      context.Context // the message's, as it was delivered
	key      Key             // of the first attempt
	keyed    bool
	uuid     string
	payload  message.Payload
	metadata message.Metadata
}

func (d *delivery) begin(msg *message.Message) {
	d.ctx, d.uuid, d.payload = msg.Context(), msg.UUID, msg.Payload
	if len(msg.Metadata) > 0 {
		d.metadata = maps.Clone(msg.Metadata)
	}
}

// restore puts back what a failed attempt has left in the message, so that the next one, and the poison queue, get what
// was delivered. What the handler has written into the payload's bytes stays.
func (d *delivery) restore(msg *message.Message) {
	msg.UUID, msg.Payload = d.uuid, d.payload
	if !maps.Equal(msg.Metadata, d.metadata) {
		msg.Metadata = maps.Clone(d.metadata)
		if msg.Metadata == nil {
			msg.Metadata = message.Metadata{}
		}
	}
}

type deliveryContextKey struct{ *Middleware }

// Delivery is the outermost middleware of an inbox. It fixes the message's key for all attempts of a Retry inside of it,
// and lets a publish that backs off end with the delivery, see [Middleware.DecoratePublisher]. [Middleware.AddTo] adds
// it.
func (m *Middleware) Delivery(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		d := &delivery{}
		d.begin(msg)
		defer msg.SetContext(d.ctx)
		msg.SetContext(context.WithValue(d.ctx, deliveryContextKey{m}, d))
		return h(msg)
	}
}

// fixKey returns the key of the delivery, which the first attempt has found.
func (a *attempt) fixKey() Key {
	var ok bool
	if a.delivery, ok = a.outer.Value(deliveryContextKey{a.Middleware}).(*delivery); !ok {
		a.delivery = &a.own
		a.own.begin(a.msg)
	}
	if !a.delivery.keyed {
		a.delivery.key, a.delivery.keyed = Key{
			Consumer:  a.options.Consumer(message.HandlerNameFromCtx(a.outer)),
			MessageID: a.options.MessageID(a.msg),
		}, true
	}
	return a.delivery.key
}

// RestoreContext is a middleware that leaves the message's context as it found it. Between Retry and Watermill's Timeout
// it keeps the dead context, which Timeout leaves on the message, from the poison queue's publisher.
// [Middleware.AddTo] adds it.
func RestoreContext(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		defer msg.SetContext(msg.Context())
		return h(msg)
	}
}

// publishContext is the context of a message that a handler returned: the values are the handler's, and the end is the
// delivery's, because the handler's context is over when the router publishes.
type publishContext struct {
	context.Context
	values context.Context
}

// Value implements context.Context.
func (c publishContext) Value(key any) any { return c.values.Value(key) }

// outlive gives messages that carry the handler's context one that lives as long as the delivery.
func (a *attempt) outlive(produced []*message.Message) {
	for _, msg := range produced {
		ctx := msg.Context()
		if open, ok := ctx.Value(transactionContextKey{}).(*openTransaction); !ok || open != &a.inner.open {
			continue
		}
		end := context.WithoutCancel(a.outer)
		if a.delivery != &a.own {
			end = a.delivery.ctx
		}
		msg.SetContext(publishContext{end, ctx})
	}
}
