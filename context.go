package inbox

import (
	"context"
	"sync/atomic"
)

type (
	keyContextKey         struct{}
	transactionContextKey struct{}
)

// KeyFromContext returns the key of the message that is being handled.
//
// It is the same for every copy of a message, which makes it the idempotency key to send to a payment
// provider, a mail service, or whatever else the database transaction does not cover.
func KeyFromContext(ctx context.Context) (Key, bool) {
	key, ok := ctx.Value(keyContextKey{}).(*Key)
	if !ok {
		return Key{}, false
	}
	return *key, true
}

// ContextWithKey returns a context in which [KeyFromContext] finds the key, for a handler's unit test.
func ContextWithKey(ctx context.Context, key Key) context.Context {
	return context.WithValue(ctx, keyContextKey{}, &key)
}

// openTransaction is what a context holds of a transaction. The context may outlive the attempt (a
// goroutine, a produced message); the transaction in it may not.
type openTransaction struct {
	Transaction
	ended atomic.Bool
}

// handlerContext is the context that the handler finds on its message: the message's own with a key and a
// transaction. One type for both, because it is made for every message.
type handlerContext struct {
	context.Context
	key  Key
	open openTransaction
}

// Value implements context.Context.
func (c *handlerContext) Value(key any) any {
	switch key.(type) {
	case keyContextKey:
		return &c.key
	case transactionContextKey:
		return &c.open
	}
	return c.Context.Value(key)
}

// TransactionFromContext returns the open transaction of the message that is being handled, if it is a T
// or wraps one (a method Unwrap() Transaction). It returns false outside of a handler, and in every
// context of an attempt that has been committed or rolled back.
//
// It is for implementations of [Repository]; a handler calls its repository package's own function,
// which returns a type that the handler can use.
func TransactionFromContext[T Transaction](ctx context.Context) (T, bool) {
	if open, ok := ctx.Value(transactionContextKey{}).(*openTransaction); ok && !open.ended.Load() {
		for transaction := open.Transaction; transaction != nil; {
			if t, ok := transaction.(T); ok {
				return t, true
			}
			wrapper, ok := transaction.(interface{ Unwrap() Transaction })
			if !ok {
				break
			}
			transaction = wrapper.Unwrap()
		}
	}
	var none T
	return none, false
}

// ContextWithTransaction returns a context in which [TransactionFromContext] finds the transaction. It is
// for a repository package's helpers for unit tests; the middleware does this by itself.
func ContextWithTransaction(ctx context.Context, transaction Transaction) context.Context {
	return context.WithValue(ctx, transactionContextKey{}, &openTransaction{Transaction: transaction})
}
