package main

import (
	"fmt"
	"slices"
)

// spread is the median of some figures, and the quartiles: half of the figures are between low and high.
type spread struct{ low, median, high float64 }

func spreadOf(figures []float64) spread {
	sorted := slices.Sorted(slices.Values(figures))
	return spread{quantile(sorted, 0.25), quantile(sorted, 0.5), quantile(sorted, 0.75)}
}

// quantile interpolates between the two nearest figures.
func quantile(sorted []float64, q float64) float64 {
	at := q * float64(len(sorted)-1)
	i := int(at)
	if i == len(sorted)-1 {
		return sorted[i]
	}
	return sorted[i] + (at-float64(i))*(sorted[i+1]-sorted[i])
}

func (s spread) String() string {
	return fmt.Sprintf("%.2f (%.2f-%.2f)", s.median, s.low, s.high)
}
